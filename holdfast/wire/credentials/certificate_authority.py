"""A job's own certificate authority, made when the job starts; it signs the certificates of controller and nodes."""

import datetime
import urllib.parse
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.wire.credentials import node_serials
from holdfast.wire.credentials.mutual_tls import CONTROLLER, NODE, SIGNING, KeyFiles, write_secret

_AGES = datetime.timedelta(days=36500)


class CertificateAuthority:
    """Signs certificates for one job; its key stays in a folder that only its owner can read."""

    def __init__(self, folder: Path) -> None:
        """Load the authority that this folder holds, or make a new one there."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.keys = KeyFiles.in_folder(folder)
        self._folder = folder
        signing = folder / SIGNING
        if signing.exists():
            self._key = _load_key(signing.read_bytes())
            self._own = x509.load_pem_x509_certificate(self.keys.authority.read_bytes())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast job")])
        self._own = (
            _certificate_builder(name, self._key.public_key())
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        write_secret(self.keys.authority, _certificate_pem(self._own))
        own = ec.generate_private_key(ec.SECP256R1())
        write_secret(self.keys.key, key_pem(own))
        write_secret(self.keys.certificate, self._sign_key(own.public_key(), x509.DNSName(CONTROLLER)))
        write_secret(signing, key_pem(self._key))  # last: what has it is whole

    def sign_node(self, name: str, request: bytes) -> bytes:
        """Return a node's certificate (PEM) for the key of a signing request. Raise ValueError for a bad request."""
        asked = x509.load_pem_x509_csr(request)
        if not asked.is_signature_valid:
            raise ValueError("the request is not signed by its own key")
        key = asked.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("the request has an unexpected kind of key")
        return self._sign_key(key, x509.UniformResourceIdentifier(NODE + urllib.parse.quote(name, safe="")))

    def node_serials(self) -> node_serials.RecordedSerials:
        """Return the certificate serial of every node that was ever registered, by node name."""
        return node_serials.read_serials(self._folder)

    def register_node(self, name: str, certificate: bytes) -> str:
        """Record the certificate of a node and return its serial."""
        serial = f"{x509.load_pem_x509_certificate(certificate).serial_number:X}"
        serial = serial.rjust(len(serial) + len(serial) % 2, "0")  # as the ssl module shows it
        self.record_serial(name, serial)
        return serial

    def record_serial(self, name: str, serial: str) -> None:
        node_serials.add_serial(self._folder, name, serial)

    def _sign_key(self, key: ec.EllipticCurvePublicKey, who: x509.GeneralName) -> bytes:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast")])
        issuer = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        made = (
            _certificate_builder(name, key)
            .issuer_name(self._own.subject)
            .add_extension(x509.SubjectAlternativeName([who]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _certificate_pem(made)


def enrol_local_node(authority: CertificateAuthority, name: str, folder: Path) -> KeyFiles:
    """Make and register key files for a node on the authority's own host."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys, key = KeyFiles.in_folder(folder), make_key()
    own, signed = authority.keys.authority.read_bytes(), authority.sign_node(name, request_pem(key))
    authority.register_node(name, signed)
    for path, content in zip(keys, (key_pem(key), signed, own), strict=True):
        write_secret(path, content)
    return keys


def _certificate_builder(name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    since = max(now - _AGES, datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC))
    builder = x509.CertificateBuilder().subject_name(name).public_key(key).serial_number(x509.random_serial_number())
    return builder.not_valid_before(since).not_valid_after(now + _AGES)


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def request_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a signing request for a node's key, without the node's name, which is proved separately."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast")])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)
