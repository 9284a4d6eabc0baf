import pytest

from megapipe.layout import devices
from megapipe.layout.devices import CPU, device, local_device, peak


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_known_devices(device_name, tflops):
    assert peak(device_name) == tflops


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H1000",
        "",
    ],
)
def test_no_peak_is_better_than_a_wrong_one(device_name):
    assert peak(device_name) is None


@pytest.mark.parametrize(
    ("device_name", "memory_gb"),
    [
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("A100", None),
        ("NVIDIA H100 80GB HBM3", 80),
        ("H100", 80),
        ("NVIDIA GH200 480GB", 96),
        ("Tesla V100-SXM2-16GB", 16),
        ("Tesla V100-PCIE-32GB", 32),
    ],
)
def test_memory(device_name, memory_gb):
    assert device(device_name).memory_gb == memory_gb


def test_device_of_this_machine(tmp_path):
    assert local_device(tmp_path / "none") is None
    (tmp_path / "0000:17:00.0").mkdir()
    text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n"
    (tmp_path / "0000:17:00.0" / "information").write_text(text)
    assert local_device(tmp_path) == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("known", [entry for _, entry in devices._DEVICES])
def test_shares_of_peaks_are_shares(known):
    reaches = known.architecture
    for share in ("gemm", "small_tile", "forward", "backward", "bytes", "fp32"):
        assert 0 < getattr(reaches, share) <= 1, share
    assert 0 <= reaches.longest_row <= 1
    assert reaches.backward < reaches.forward
    assert reaches.fp8 in (1, 2)
    assert min(reaches.gemm_fill, reaches.kernel_us, reaches.host_us) >= 0


@pytest.mark.parametrize(("pattern", "known"), devices._DEVICES)
def test_every_device_has_a_bandwidth_and_its_units(pattern, known):
    assert known.tflops > 0
    assert 0 < known.tb_s < 10
    if pattern != CPU:
        assert known.units is not None
        assert known.link_gb_s is not None


def test_the_first_entry_that_fits_is_the_right_one():
    """A shorter name must not hide a longer one that contains it."""
    for pattern, known in devices._DEVICES:
        found = device(pattern)
        assert (found.tflops, found.tb_s, found.units) == (known.tflops, known.tb_s, known.units)


def test_the_cpu_is_a_device():
    cpu = device(CPU)
    assert peak(CPU) == cpu.tflops > 0
    assert (cpu.units, cpu.link_gb_s, cpu.memory_gb) == (None, None, None)
    assert device("cpus") is None
