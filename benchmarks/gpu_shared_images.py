"""benchmarks/shared_images.py on a GPU: 16 GiB of weights, two engines.

python benchmarks/gpu_shared_images.py
"""

from __future__ import annotations

from shared_images import main

if __name__ == "__main__":
    main("cuda", gib=16.0, quick_gib=2.0, engines="2")
