"""Compiling kernels and whole programs for AMD GPUs on a machine that has none (`gdnjax amd-check`).

Nothing here runs on a GPU. `machine_code` compiles single kernels with the `triton` package, `rocm_compiler`
whole programs with XLA's ROCm compiler; each compilation is a job in a process of its own (`jobs`, `worker`).
"""
