"""Where the blocks of a KV cache lie: ours, checked against the tensors, and a peer's, checked against what it offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torpor.connectors.wire import Offer, WirePlace, WireSpec, from_wire, to_wire
from torpor.errors import ConnectorError, HandshakeError
from torpor.kvcache.types import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.memory.ledger import ExportedPool

KV_TAG = "kv_cache"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tensor of a layer begins: bytes from the begin of a region."""

    region: int
    offset: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """``bases`` are the regions' addresses in whatever address space is meant: ours, a peer's, or ours of a peer's import.

    tensor of a layer:  K block 0 | K block 1 | ... | V block 0 | V block 1 | ...
                        ^ place                     ^ place + num_blocks * block_bytes
    """

    spec: KVCacheSpec
    bases: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def arrays(self) -> list[int]:
        """Addresses of block 0 of K and of V of every layer: [K of layer 0, V of layer 0, K of layer 1, ...]."""
        half = self.spec.num_blocks * self.spec.block_bytes
        starts = [self.bases[place.region] + place.offset for place in self.places]
        return [address for start in starts for address in (start, start + half)]

    def at(self, bases: Sequence[int]) -> Geometry:
        return Geometry(self.spec, tuple(bases), self.sizes, self.places)

    def of_weights(self, model_id: str) -> Geometry:
        """The same place, with KV of other weights in it."""
        return replace(self, spec=replace(self.spec, model_id=model_id))

    def wire_places(self) -> list[WirePlace]:
        return [WirePlace(region=p.region, offset=p.offset) for p in self.places]

    def wire_spec(self) -> WireSpec:
        return to_wire(self.spec)


def of_tensors(kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, exported: ExportedPool) -> Geometry:
    """ConnectorError when the tensors are not the whole KV cache in the pool that sleeps, in the layout of ``KVCacheSpec``."""
    bases = tuple(region.address for region in exported.regions)
    sizes = tuple(region.nbytes for region in exported.regions)
    addresses = layer_addresses(kv_caches, spec)
    places = [_place(a, spec.layer_bytes, bases, sizes, f"layers.{i}") for i, a in enumerate(addresses)]
    return Geometry(spec, bases, sizes, tuple(places))


def layer_addresses(kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec) -> list[int]:
    """Where the tensor of every layer begins. ConnectorError when they are not those of ``spec``."""
    shape = (2, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    addresses = []
    for layer in range(spec.num_layers):
        tensor = kv_caches.get(f"layers.{layer}")
        if (
            tensor is None
            or tuple(tensor.shape) != shape
            or not tensor.is_contiguous()
            or str(tensor.dtype) != f"torch.{spec.dtype}"
        ):
            found = "is missing" if tensor is None else f"is {tuple(tensor.shape)} {tensor.dtype}"
            raise ConnectorError(f"KV cache tensor 'layers.{layer}' {found}, not a contiguous {shape} {spec.dtype}")
        addresses.append(tensor.data_ptr())
    return addresses


def _place(address: int, nbytes: int, bases: Sequence[int], sizes: Sequence[int], name: str) -> Place:
    for region, (base, size) in enumerate(zip(bases, sizes, strict=True)):
        if base <= address and address + nbytes <= base + size:
            return Place(region, address - base)
    raise ConnectorError(f"KV cache tensor {name!r} lies in no region of pool {KV_TAG!r}")


def of_offer(offer: Offer, who: str) -> Geometry:
    """HandshakeError unless every layer lies inside a region: nothing read by these numbers is outside what was offered."""
    spec = from_wire(offer.spec)
    sizes = tuple(sum(region.extents) for region in offer.regions)
    places = tuple(Place(place.region, place.offset) for place in offer.layers)
    if len(places) != spec.num_layers or spec.num_blocks < 1 or offer.fence_slots < 1:
        raise HandshakeError(
            f"{who} offers {len(places)} of {spec.num_layers} layers, {spec.num_blocks} blocks, {offer.fence_slots} leases",
            peer=who,
        )
    for layer, place in enumerate(places):
        if place.region >= len(sizes) or place.offset + spec.layer_bytes > sizes[place.region]:
            raise HandshakeError(
                f"{who} offers layer {layer} outside its memory (region {place.region}, offset {place.offset})", peer=who
            )
    return Geometry(spec, tuple(region.address for region in offer.regions), sizes, places)
