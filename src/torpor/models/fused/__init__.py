"""Decoder layers with few kernels: norms with their residual, norm and rotation of Q and K, and the gated activation are one
kernel each, Q, K and V one product, gate and up another. ``fuse`` finds out whether a model has such layers."""

from torpor.models.fused.decoder import FusedDecoder, fuse
from torpor.models.fused.merge import merged_names

__all__ = ["FusedDecoder", "fuse", "merged_names"]
