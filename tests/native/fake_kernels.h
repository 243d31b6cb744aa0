// The kernels of cuda_kernels.cu on the processor, one thread of the grid after the other.
#pragma once

// Runs a grid of `blocks` blocks of `threads` threads with the arguments that cuLaunchKernel got.
using FakeKernel = void (*)(unsigned blocks, unsigned threads, void **arguments);

FakeKernel fake_kernel(const char *name);  // null: there is none of that name
