"""Restoring a state: from an image that lies in memory, or from a checkpoint, cut the same way or another."""

import sys
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from holdfast.checkpoint import dcp, load
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.manifest import StorageError
from holdfast.checkpoint.state import EXTRA, Image, StateError
from holdfast.checkpoint.storage import at
from holdfast.client.extras import Extras, unpacked
from holdfast.client.own import Own
from holdfast.client.snapshots import Snapshots
from holdfast.client.trained import Trained
from holdfast.client.world import World

Source = Trained | Own
