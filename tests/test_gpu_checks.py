"""What `fluidtune doctor` says of machines with GPUs, played by a stand-in of NVML."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from fluidtune.gpu_checks import gpu_checks

GIB = 1 << 30
TORCH = SimpleNamespace(
    version=SimpleNamespace(cuda="12.8"), distributed=SimpleNamespace(is_nccl_available=lambda: True)
)


class Nvml:
    """pynvml on a machine with GPUs of these names. A setting that is an exception is raised."""

    NVMLError = RuntimeError

    def __init__(self, names=("A GPU",), cuda=13000, mode=0, mig=None, ecc=0, peers=0, dead=()):
        self.names, self.cuda, self.mode, self.mig, self.ecc = names, cuda, mode, mig, ecc
        self.peers, self.dead = peers, dead

    def __getattr__(self, name):
        return getattr(pynvml, name)  # its constants

    def nvmlDeviceGetCount(self):
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.dead:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlSystemGetDriverVersion(self):
        return "580.65"

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{gpu}abc"

    def nvmlDeviceGetName(self, gpu):
        return self.names[gpu]

    def nvmlDeviceGetComputeMode(self, gpu):
        return self.mode

    def nvmlDeviceGetMigMode(self, gpu):
        if self.mig is None:
            raise RuntimeError("Not Supported")
        return self.mig

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return self.ecc

    def nvmlDeviceGetP2PStatus(self, first, second, what):
        assert what == pynvml.NVML_P2P_CAPS_INDEX_READ
        return self.peers


def checked(nvml=None, torch=TORCH, **environment):
    return list(gpu_checks(nvml or Nvml(), torch, environment))


def test_a_machine_that_is_well():
    assert [(name, well) for name, well, _ in checked(Nvml(("A", "A")))] == [
        ("cuda", True),
        ("visible gpus", True),
        ("peer access", True),
        ("nccl", True),
    ]


@pytest.mark.parametrize(
    ("change", "name", "well", "said"),
    [
        (dict(nvml=Nvml(cuda=11080)), "cuda", False, "driver 580.65 for CUDA 11.8, torch for 12.8: install a driver"),
        (dict(torch=SimpleNamespace(version=SimpleNamespace(cuda=None))), "cuda", False, "a torch without CUDA"),
        (dict(torch=None), "cuda", False, "no torch"),
        (dict(CUDA_VISIBLE_DEVICES="0,7"), "visible gpus", False, "no GPU here is 7"),
        (dict(CUDA_VISIBLE_DEVICES="GPU-0a"), "visible gpus", True, "1 of 1"),
        (dict(CUDA_VISIBLE_DEVICES="GPU-9"), "visible gpus", False, "no GPU here is GPU-9"),
        (dict(CUDA_VISIBLE_DEVICES=""), "visible gpus", False, "0 of 1"),
        (dict(nvml=Nvml(mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)), "gpu 0", False, "--max-packing 1"),
        (dict(nvml=Nvml(mode=pynvml.NVML_COMPUTEMODE_PROHIBITED)), "gpu 0", False, "nvidia-smi -i 0 -c DEFAULT"),
        (dict(nvml=Nvml(mig=(1, 1))), "gpu 0", True, "divided by MIG"),
        (dict(nvml=Nvml(ecc=3)), "gpu 0", False, "3 uncorrected memory errors"),
        (dict(nvml=Nvml(("A", "B"))), "kinds of gpus", False, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (dict(nvml=Nvml(("A", "B")), CUDA_DEVICE_ORDER="PCI_BUS_ID"), "kinds of gpus", True, "as if all were alike"),
        (dict(nvml=Nvml(("A", "A", "A"), peers=1)), "peer access", True, "3 pairs do not reach each other, as 0 and 1"),
        (dict(nvml=Nvml(("A", "A"), dead=(1,))), "gpu 1", False, "does not answer (GPU is lost)"),
    ],
)  # fmt: skip
def test_what_is_found(change, name, well, said):
    found = [(how, what) for part, how, what in checked(**change) if part == name]
    assert len(found) == 1 and found[0][0] is well and said in found[0][1]


def test_a_machine_whose_only_gpu_is_lost():
    assert [name for name, _, _ in checked(Nvml(dead=(0,)))] == ["gpu 0"]
