"""Instance types with a known price, and the GPUs that nodes can use: a row per type, V100 to B200 on both clouds.

A row describes the hardware, never the price. Prices are queried by the names of the rows, and a GCP price is added up
from the counts of a row (cores, memory, GPUs, local SSD).

Sources. AWS: `DescribeInstanceTypes` as recorded in moto 5.2.5, checked 2026-11-22. moto lacks p3.2xlarge to
p3.16xlarge, whose rows come from the EC2 user guide (general knowledge, not re-checked). GCP: "Accelerator-optimized
machine family" (docs.cloud.google.com/compute/docs/accelerator-optimized-machines, a stored copy of 2026) for A2, A3
and A4; G2 and N1 from the same guide's neighbours (general knowledge, not re-checked). G4: the machine series' table in
Cyclenerd/google-cloud-compute-machine-types, issue 46 (2026-04-28).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.events import Market

BOTH = (Market.ON_DEMAND, Market.SPOT)
SPOT_ONLY = (Market.SPOT,)
"""Markets of types without a quotable on-demand price. Besides spot, GCP sells the types only for reserved or queued
terms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """An instance type with its GPUs. Memory in GiB; `gpu_mem_gib` is the memory of one GPU.

    GCP attaches V100 and T4 to an N1 of the buyer's choice. The name `n1-highmem-8+V100:1` holds the type to create and
    the GPU to attach.
    """

    cloud: str
    instance_type: str
    accelerator: str
    gpus: int
    vcpus: int
    mem_gib: int
    gpu_mem_gib: int
    local_ssd_gib: int
    markets: tuple[Market, ...] = BOTH

    @property
    def machine_type(self) -> str:
        """Return the cloud's own name of the type, without attached GPUs."""
        return self.instance_type.partition("+")[0]


def _aws(
    instance_type: str, accelerator: str, gpus: int, vcpus: int, mem_gib: int, gpu_mem_gib: int, ssd_gb: int
) -> InstanceType:
    return InstanceType(
        cloud="aws",
        instance_type=instance_type,
        accelerator=accelerator,
        gpus=gpus,
        vcpus=vcpus,
        mem_gib=mem_gib,
        gpu_mem_gib=gpu_mem_gib,
        local_ssd_gib=ssd_gb * 10**9 // 2**30,  # EC2 counts disks in GB
    )


def _gcp(
    instance_type: str,
    accelerator: str,
    gpus: int,
    vcpus: int,
    mem_gib: int,
    gpu_mem_gib: int,
    ssd_gib: int = 0,
    markets: tuple[Market, ...] = BOTH,
) -> InstanceType:
    return InstanceType(
        cloud="gcp",
        instance_type=instance_type,
        accelerator=accelerator,
        gpus=gpus,
        vcpus=vcpus,
        mem_gib=mem_gib,
        gpu_mem_gib=gpu_mem_gib,
        local_ssd_gib=ssd_gib,
        markets=markets,
    )


# cloud, instance type, accelerator (SkyPilot's name), GPUs, vCPUs, memory, memory of one GPU, local SSD
INSTANCE_TYPES: tuple[InstanceType, ...] = (
    _aws("p3.2xlarge", "V100", 1, 8, 61, 16, 0),
    _aws("p3.8xlarge", "V100", 4, 32, 244, 16, 0),
    _aws("p3.16xlarge", "V100", 8, 64, 488, 16, 0),
    _aws("g4dn.xlarge", "T4", 1, 4, 16, 16, 125),
    _aws("g4dn.2xlarge", "T4", 1, 8, 32, 16, 225),
    _aws("g4dn.12xlarge", "T4", 4, 48, 192, 16, 900),
    _aws("g6.xlarge", "L4", 1, 4, 16, 24, 250),
    _aws("g6.2xlarge", "L4", 1, 8, 32, 24, 450),
    _aws("gr6.4xlarge", "L4", 1, 16, 128, 24, 600),
    _aws("g6.12xlarge", "L4", 4, 48, 192, 24, 3760),
    _aws("g6.48xlarge", "L4", 8, 192, 768, 24, 7520),
    _aws("g5.xlarge", "A10G", 1, 4, 16, 24, 250),
    _aws("g5.2xlarge", "A10G", 1, 8, 32, 24, 450),
    _aws("g5.12xlarge", "A10G", 4, 48, 192, 24, 3800),
    _aws("g5.48xlarge", "A10G", 8, 192, 768, 24, 7600),
    _aws("g6e.xlarge", "L40S", 1, 4, 32, 48, 250),
    _aws("g6e.2xlarge", "L40S", 1, 8, 64, 48, 450),
    _aws("g6e.12xlarge", "L40S", 4, 48, 384, 48, 3800),
    _aws("g6e.48xlarge", "L40S", 8, 192, 1536, 48, 7600),
    _aws("g7e.2xlarge", "RTXPRO6000", 1, 8, 64, 96, 1900),
    _aws("g7e.4xlarge", "RTXPRO6000", 1, 16, 128, 96, 1900),
    _aws("g7e.12xlarge", "RTXPRO6000", 2, 48, 512, 96, 3800),
    _aws("g7e.24xlarge", "RTXPRO6000", 4, 96, 1024, 96, 7600),
    _aws("g7e.48xlarge", "RTXPRO6000", 8, 192, 2048, 96, 15200),
    _aws("p4d.24xlarge", "A100", 8, 96, 1152, 40, 8000),
    _aws("p4de.24xlarge", "A100-80GB", 8, 96, 1152, 80, 8000),
    _aws("p5.4xlarge", "H100", 1, 16, 256, 80, 3800),
    _aws("p5.48xlarge", "H100", 8, 192, 2048, 80, 30400),
    _aws("p5e.48xlarge", "H200", 8, 192, 2048, 141, 30400),
    _aws("p5en.48xlarge", "H200", 8, 192, 2048, 141, 30400),
    _aws("p6-b200.48xlarge", "B200", 8, 192, 2048, 179, 30400),
    _gcp("n1-highmem-8+V100:1", "V100", 1, 8, 52, 16),
    _gcp("n1-highmem-32+V100:4", "V100", 4, 32, 208, 16),
    _gcp("n1-highmem-64+V100:8", "V100", 8, 64, 416, 16),
    _gcp("n1-highmem-8+T4:1", "T4", 1, 8, 52, 16),
    _gcp("n1-highmem-32+T4:4", "T4", 4, 32, 208, 16),
    _gcp("g2-standard-4", "L4", 1, 4, 16, 24),
    _gcp("g2-standard-8", "L4", 1, 8, 32, 24),
    _gcp("g2-standard-24", "L4", 2, 24, 96, 24),
    _gcp("g2-standard-48", "L4", 4, 48, 192, 24),
    _gcp("g2-standard-96", "L4", 8, 96, 384, 24),
    _gcp("g4-standard-48", "RTXPRO6000", 1, 48, 180, 96),
    _gcp("g4-standard-96", "RTXPRO6000", 2, 96, 360, 96),
    _gcp("g4-standard-192", "RTXPRO6000", 4, 192, 720, 96),
    _gcp("g4-standard-384", "RTXPRO6000", 8, 384, 1440, 96),
    _gcp("a2-highgpu-1g", "A100", 1, 12, 85, 40),
    _gcp("a2-highgpu-2g", "A100", 2, 24, 170, 40),
    _gcp("a2-highgpu-4g", "A100", 4, 48, 340, 40),
    _gcp("a2-highgpu-8g", "A100", 8, 96, 680, 40),
    _gcp("a2-ultragpu-1g", "A100-80GB", 1, 12, 170, 80, 375),
    _gcp("a2-ultragpu-2g", "A100-80GB", 2, 24, 340, 80, 750),
    _gcp("a2-ultragpu-4g", "A100-80GB", 4, 48, 680, 80, 1500),
    _gcp("a2-ultragpu-8g", "A100-80GB", 8, 96, 1360, 80, 3000),
    _gcp("a3-highgpu-1g", "H100", 1, 26, 234, 80, 750, SPOT_ONLY),
    _gcp("a3-highgpu-2g", "H100", 2, 52, 468, 80, 1500, SPOT_ONLY),
    _gcp("a3-highgpu-4g", "H100", 4, 104, 936, 80, 3000, SPOT_ONLY),
    _gcp("a3-highgpu-8g", "H100", 8, 208, 1872, 80, 6000),
    _gcp("a3-ultragpu-8g", "H200", 8, 224, 2952, 141, 12000, SPOT_ONLY),
    _gcp("a4-highgpu-8g", "B200", 8, 224, 3968, 180, 12000, SPOT_ONLY),
)

COMPUTE_CAPABILITY: Mapping[str, tuple[int, int]] = {
    "K80": (3, 7),
    "M60": (5, 2),
    "P100": (6, 0),
    "P4": (6, 1),
    "V100": (7, 0),
    "V100-32GB": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A100-80GB": (8, 0),
    "A10": (8, 6),
    "A10G": (8, 6),
    "L4": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
    "RTXPRO6000": (12, 0),
}
"""Compute capability by accelerator, from NVIDIA's table (developer.nvidia.com/cuda-gpus; general knowledge, not
re-checked)."""

LEAST_CAPABILITY = (7, 5)
"""Lowest usable compute capability. The torch of engine/node.lock (2.13, built for CUDA 13) has no code for older
GPUs. CUDA 13 also needs driver 580, and SkyPilot 0.14.1 starts older GPUs from an image with driver 535
(sky/clouds/utils/gpu_utils.py)."""

_BY_NAME = {(machine.cloud, machine.instance_type): machine for machine in INSTANCE_TYPES}


def instance_type_of(cloud: str, instance_type: str) -> InstanceType | None:
    """Return the type with this name; None for an unknown name."""
    return _BY_NAME.get((cloud, instance_type))


def is_too_old(accelerator: str) -> bool:
    """Return whether nodes could not use the GPU. Names compare without case; an unknown GPU is not too old."""
    capability = next(
        (capability for name, capability in COMPUTE_CAPABILITY.items() if name.lower() == accelerator.lower()), None
    )
    return capability is not None and capability < LEAST_CAPABILITY


def instance_types(clouds: Collection[str] = (), accelerators: Collection[str] = ()) -> tuple[InstanceType, ...]:
    """Return the types of the given clouds and accelerators.

    An empty collection selects all; names compare without case.
    """
    gpu_names = {name.lower() for name in accelerators}
    return tuple(
        machine
        for machine in INSTANCE_TYPES
        if (not clouds or machine.cloud in clouds) and (not gpu_names or machine.accelerator.lower() in gpu_names)
    )
