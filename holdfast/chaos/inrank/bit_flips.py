"""Flips bits of tensors in place."""

import random

import torch

# Bits of the exponent and of the mantissa; the sign is the one above them.
_FORMS = {
    torch.float32: (8, 23, torch.int32),
    torch.float64: (11, 52, torch.int64),
    torch.float16: (5, 10, torch.int16),
    torch.bfloat16: (8, 7, torch.int16),
}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local shard, or a plain tensor itself. Autograd does not see changes to the result."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.data


def can_flip(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _FORMS and local_part(tensor).numel() > 0


def choose_bit(kind: str, dtype: torch.dtype, dice: random.Random) -> int:
    exponent, mantissa, _ = _FORMS[dtype]
    match kind:
        case "sign":
            return exponent + mantissa
        case "exponent":
            return dice.randrange(mantissa, mantissa + exponent)
        case "mantissa":
            return dice.randrange(mantissa)
    return dice.randrange(exponent + mantissa + 1)


def flip_bits(tensors: list[torch.Tensor], kind: str, count: int, dice: random.Random) -> str:
    """Flip bits of random elements, or set them to NaN; return the changes in words, empty if no tensor fits."""
    parts = [local_part(tensor) for tensor in tensors if can_flip(tensor)]
    if not parts:
        return ""
    said = []
    for _ in range(count):
        part, at = _draw_element(parts, dice)
        flat = part.view(-1) if part.is_contiguous() else part.reshape(-1)
        before = float(flat[at])
        if kind == "nan":
            flat[at] = float("nan")
            what = "NaN"
        else:
            bit = choose_bit(kind, flat.dtype, dice)
            words = flat.view(_FORMS[flat.dtype][2])
            width = 8 * words.element_size()
            words[at] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
            what = f"bit {bit}"
        if not part.is_contiguous():
            part.copy_(flat.view(part.shape))
        said.append(f"{what} of element {at} of {tuple(part.shape)}: {before:g} to {float(flat[at]):g}")
    return "; ".join(said)


def _draw_element(parts: list[torch.Tensor], dice: random.Random) -> tuple[torch.Tensor, int]:
    place = dice.randrange(sum(part.numel() for part in parts))
    for part in parts:
        if place < part.numel():
            return part, place
        place -= part.numel()
    raise AssertionError("beyond the last element")
