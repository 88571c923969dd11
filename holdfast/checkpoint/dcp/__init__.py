"""Connects checkpoints to torch.distributed.checkpoint: their metadata, and storage for its `save` and `load`."""

from holdfast.checkpoint.dcp.reader import Planner, Reader
from holdfast.checkpoint.dcp.torch_metadata import decode_metadata, encode_metadata
from holdfast.checkpoint.dcp.writer import Writer

__all__ = ["Planner", "Reader", "Writer", "decode_metadata", "encode_metadata"]
