"""The AMD GPUs that are compiled for, one product an architecture."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """One architecture, with the sizes of one product that has it.

    * `wave`: lanes a wave.
    * `cores`: what HIP calls multiprocessors: compute units on gfx9, pairs of them on gfx11 and gfx12.
    * `lds`: bytes of LDS that one workgroup can have; `simds` SIMDs share them.
    * `memory`, `l2`: bytes. `bandwidth`: bytes a second. `clock`: GHz.
    * `registers`: 32-bit vector registers of a core.

    Bandwidth, clock and the caches steer nothing but XLA's cost model.
    """

    arch: str
    product: str
    wave: int
    cores: int
    lds: int
    simds: int
    memory: int
    bandwidth: int
    l2: int
    clock: float
    registers: int
    features: str = ""

    @property
    def text_proto(self) -> str:
        """The target as XLA takes it, a GpuTargetConfigProto.

        The description is the architecture's name, not the product's: it becomes JAX's device kind, in
        which Pallas and this project look for `gfx`.
        """
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: {self.wave}
              threads_per_core_limit: 2048
              shared_memory_per_block: {self.lds}
              shared_memory_per_block_optin: {self.lds}
              shared_memory_per_core: {self.lds}
              core_count: {self.cores}
              fpus_per_core: 128
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65536
              block_dim_limit_z: 65536
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              registers_per_core_limit: {self.registers}
              registers_per_block_limit: {self.registers}
              rocm_compute_capability {{ gcn_arch_name: "{self.arch}{self.features}" }}
            }}
            platform_name: "ROCM"
            device_description_str: "{self.arch}"
        """


KIB, MIB, GIB = 2**10, 2**20, 2**30

TARGETS = {
    target.arch: target
    for target in (
        Target("gfx90a", "MI250X, one die", 64, 110, 64 * KIB, 4, 64 * GIB, 1_638 * 10**9, 8 * MIB, 1.7, 131072,
               ":sramecc+:xnack-"),
        Target("gfx942", "MI300X", 64, 304, 64 * KIB, 4, 192 * GIB, 5_300 * 10**9, 4 * MIB, 2.1, 131072,
               ":sramecc+:xnack-"),
        Target("gfx950", "MI350X", 64, 256, 160 * KIB, 4, 288 * GIB, 8_000 * 10**9, 4 * MIB, 2.2, 131072,
               ":sramecc+:xnack-"),
        Target("gfx1100", "RX 7900 XTX", 32, 48, 64 * KIB, 2, 24 * GIB, 960 * 10**9, 6 * MIB, 2.5, 196608),
        Target("gfx1201", "AI PRO R9700", 32, 32, 64 * KIB, 2, 32 * GIB, 640 * 10**9, 8 * MIB, 2.9, 196608),
    )
}  # fmt: skip
