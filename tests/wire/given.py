"""An organisation's own authority, as its certificates are given to holdfast."""

import datetime
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.wire.credentials.certificate_authority import key_pem
from holdfast.wire.credentials.mutual_tls import CONTROLLER, KeyFiles

NOW = datetime.datetime.now(datetime.UTC)
BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Organisation:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self._key = folder, ec.generate_private_key(ec.SECP384R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, secrets.token_hex(4))])
        self._authority = self._sign(self._key.public_key(), self._name, [x509.BasicConstraints(True, None)], 3650)
        (folder / "authority.pem").write_bytes(self._authority.public_bytes(Encoding.PEM))

    def keys(self, node: str, run: str = "", **said: object) -> KeyFiles:
        """Of one host; by default it may carry the controller."""
        names: list[x509.GeneralName] = [x509.DNSName("host.example.org")]
        names += [x509.DNSName(CONTROLLER)] if said.get("leads", True) else []
        names += [x509.UniformResourceIdentifier(f"holdfast:node:{node}")] if node else []
        names += [x509.UniformResourceIdentifier(f"holdfast:run:{run}")] if run else []
        usage = said.get("usage", BOTH)
        assert isinstance(usage, tuple)
        extensions = [
            x509.SubjectAlternativeName(names),
            x509.BasicConstraints(False, None),
            x509.ExtendedKeyUsage(usage),
        ]
        key, days = ec.generate_private_key(ec.SECP256R1()), said.get("days", 30)
        assert isinstance(days, int)
        own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "host.example.org")])
        folder = self.folder / f"{node}-{run}-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        keys = KeyFiles.in_folder(folder)
        keys.key.write_bytes(key_pem(key))
        keys.certificate.write_bytes(self._sign(key.public_key(), own, extensions, days).public_bytes(Encoding.PEM))
        keys.authority.write_bytes((self.folder / "authority.pem").read_bytes())
        return keys

    def _sign(
        self, key: ec.EllipticCurvePublicKey, name: x509.Name, extensions: list[x509.ExtensionType], days: int
    ) -> x509.Certificate:
        """`days`: from now on; below 0: it is over since then."""
        begins = NOW + datetime.timedelta(days=-1 if days > 0 else days - 1)
        made = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
        made = made.serial_number(x509.random_serial_number()).not_valid_before(begins)
        made = made.not_valid_after(NOW + datetime.timedelta(days=days))
        for extension in extensions:
            made = made.add_extension(extension, critical=False)
        return made.sign(self._key, hashes.SHA256())


def settings(keys: KeyFiles) -> tuple[str, ...]:
    """The flags by which a host is told of its files."""
    named = zip(("key", "certificate", "authority"), keys, strict=True)
    return tuple(word for name, path in named for word in ("--set", f"door.{name}={path}"))
