# What a newcomer types. Each target sets up .venv by itself; the work is in scripts/.
.PHONY: help setup demo test check gpu build clean

help:
	@echo "make demo   a prefill/decode pair sleeps, wakes, and answers byte for byte"
	@echo "make test   everything that needs no GPU"
	@echo "make check  lint, types, layers, sizes"
	@echo "make gpu    what needs an NVIDIA GPU: tests, the demo, benchmarks"
	@echo "make setup  .venv with torpor in it (the others call it)"

setup:
	@scripts/setup

demo: setup
	@scripts/demo

test: setup
	@scripts/test

check: setup
	@scripts/check

gpu:
	@scripts/gpu

build:
	@scripts/build

clean:
	rm -rf build .venv src/torpor/_native/*.so
