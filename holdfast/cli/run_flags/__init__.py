"""The flags of `holdfast run`: torchrun's and ours."""
