"""Triton kernels, one file each; `kernels.cuda_backend` launches them. Without a GPU Triton's interpreter runs them."""
