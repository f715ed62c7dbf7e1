"""Triton kernels, one file each; `kernels.cuda_backend` launches them. They run on CUDA, and in Triton's interpreter on a CPU."""
