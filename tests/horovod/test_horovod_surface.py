"""Horovod's names, with exactly its parameters, their order and defaults."""

import importlib
import inspect
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import horovod
import horovod.torch as hvd

GPS = "process_set=GPS"
REDUCED = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0"
COMPRESSED = (
    "average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0"
)
SCATTERED = "op=Average, process_set=GPS, prescale_factor=1.0, postscale_factor=1.0"
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    **dict.fromkeys(("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"), ""),
    "allreduce": f"tensor, {COMPRESSED}, {GPS}",
    **dict.fromkeys(
        ("allreduce_async", "allreduce_async_", "allreduce_"), f"tensor, {REDUCED}, {GPS}"
    ),
    "grouped_allreduce": f"tensors, {COMPRESSED}, {GPS}",
    **dict.fromkeys(
        ("grouped_allreduce_async", "grouped_allreduce_async_", "grouped_allreduce_"),
        f"tensors, {REDUCED}, {GPS}",
    ),
    "sparse_allreduce_async": f"tensor, name, op, {GPS}",
    **dict.fromkeys(("allgather", "allgather_async"), f"tensor, name=None, {GPS}"),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), f"tensors, name=None, {GPS}"),
    **dict.fromkeys(
        ("broadcast", "broadcast_async", "broadcast_async_", "broadcast_"),
        f"tensor, root_rank, name=None, {GPS}",
    ),
    **dict.fromkeys(("alltoall", "alltoall_async"), f"tensor, splits=None, name=None, {GPS}"),
    "reducescatter": f"tensor, name=None, compression=none, {SCATTERED}",
    "reducescatter_async": f"tensor, name=None, {SCATTERED}",
    "grouped_reducescatter": f"tensors, name=None, compression=none, {SCATTERED}",
    "grouped_reducescatter_async": f"tensors, name=None, {SCATTERED}",
    "join": "device=-1",
    "barrier": GPS,
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {GPS}",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=none, "
    "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, "
    f"groups=None, sparse_as_dense=False, {GPS}",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}


def written(function):
    """The parameters as the table writes them."""
    texts = []
    names = {
        id(hvd.Compression.none): "none",
        id(hvd.global_process_set): "GPS",
    }
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if default is parameter.empty:
            texts.append(parameter.name)
        elif parameter.name == "op" and default is not None:
            assert default == hvd.Average
            texts.append("op=Average")
        else:
            texts.append(f"{parameter.name}={names.get(id(default), default)}")
    return ", ".join(texts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert written(getattr(hvd, name)) == SIGNATURES[name]


def test_ops_are_plain_numbers():
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert ops == [0, 1, 2, 3, 4, 5]
    assert {type(op) for op in ops} == {int}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("horovod.torch.mpi_ops", "rank size synchronize allreduce_async_ is_homogeneous poll "
         "HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather "
         "HorovodBroadcast HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter"),
        ("horovod.torch.optimizer", "DistributedOptimizer _DistributedOptimizer"),
        ("horovod.torch.functions", "broadcast_object allgather_object broadcast_parameters"),
        ("horovod.torch.compression", "Compression Compressor NoneCompressor FP16Compressor"),
        ("horovod.common.util", "extension_available gpu_available mpi_built gloo_built "
         "nccl_built ddl_built ccl_built check_extension env split_list num_rank_is_power_2 "
         "get_average_backwards_compatibility_fun is_iterable is_version_greater_equal_than "
         "check_installed_version get_ext_suffix get_extension_full_path EXTENSIONS"),
        ("horovod.common.exceptions", "HorovodInternalError HostsUpdatedInterrupt "
         "HorovodVersionMismatchError get_version_mismatch_message"),
        ("horovod.common.process_sets", "ProcessSet global_process_set add_process_set"),
        ("horovod.data", "BaseDataLoader AsyncDataLoaderMixin"),
        ("horovod.runner", "run"),
        ("horovod.runner.common.util.env", "get_env_rank_and_size"),
        ("horovod.runner.launch", "run_commandline parse_args check_build"),
    ],
)  # fmt: skip
def test_modules_that_others_import(module, names):
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_exported_names_exist():
    for module in (hvd, importlib.import_module("horovod.torch.mpi_ops")):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_version_and_run():
    assert horovod.__version__ == "0.28.1"
    assert callable(horovod.run)
    with pytest.raises(AttributeError, match="no attribute 'ran'"):
        horovod.ran  # noqa: B018


def test_unknown_names_are_no_attributes():
    with pytest.raises(AttributeError, match="no attribute 'allreduced'"):
        getattr(hvd, "allreduced")  # noqa: B009


def test_beside_a_real_horovod_it_says_so(tmp_path):
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    code = f"import sys; sys.path = [*{sys.path!r}, {str(tmp_path)!r}]; import horovod"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "Horovod 0.28.1 is installed beside Kolovod" in done.stderr
    assert "pip uninstall horovod" in done.stderr


def test_what_is_built_for_gpus():
    import torch

    from horovod.common import basics

    assert basics.nccl_code(2, 7, 8) == 2708
    assert basics.nccl_code(2, 27, 3) == 22703
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert isinstance(hvd.nccl_built(), int)
    assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
