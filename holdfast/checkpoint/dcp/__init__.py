"""Connects holdfast's checkpoints to torch.distributed.checkpoint (DCP): translates metadata, and provides a writer for
`dcp.save` and a reader for `dcp.load`."""

from holdfast.checkpoint.dcp.reader import Planner, Reader
from holdfast.checkpoint.dcp.torch_metadata import decode_metadata, encode_metadata
from holdfast.checkpoint.dcp.writer import Writer

__all__ = ["Planner", "Reader", "Writer", "decode_metadata", "encode_metadata"]
