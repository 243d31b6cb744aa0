"""The paged KV cache: blocks and the prefix cache (no torch), and the tensors in ``torpor.kvcache.tensors``."""

from torpor.kvcache.config import CacheConfig
from torpor.kvcache.manager import KVCacheManager, PrefixHit
from torpor.kvcache.stats import KVCacheStats
from torpor.kvcache.types import BlockId, Epoch, KVCacheSpec

__all__ = ["BlockId", "CacheConfig", "Epoch", "KVCacheManager", "KVCacheSpec", "KVCacheStats", "PrefixHit"]
