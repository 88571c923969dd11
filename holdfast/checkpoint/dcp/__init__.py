"""Connects holdfast's checkpoints to torch.distributed.checkpoint (DCP): metadata, storage writer, storage reader."""

from holdfast.checkpoint.dcp.reader import Planner, Reader
from holdfast.checkpoint.dcp.torch_metadata import decode_metadata, encode_metadata
from holdfast.checkpoint.dcp.writer import Writer

__all__ = ["Planner", "Reader", "Writer", "decode_metadata", "encode_metadata"]
