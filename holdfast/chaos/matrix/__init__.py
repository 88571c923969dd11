"""The matrix: every fault in every way of training at every moment, each cell with its expected outcome."""
