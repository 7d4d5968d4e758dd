r"""What Horovod 0.28.1 has: modules, methods, parameters, values, and what an argument accepts.

The tables say what is Horovod's, whatever we have; BY_CHOICE says where we have something else on
purpose. Parameters of the front ends' functions are in other tests: of the surface, of frameworks.

A line at the margin is a module. An indented one is expressions that are possible in it, or an
expression => the parameters of what can be called (in brackets), a value, or the error that is
raised; what is indented further belongs to it. <a|b> makes a row with a and one with b.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from frameworks import is_installed

# What Horovod's own launcher and estimators consist of.
PARTS = (
    "horovod.runner.<gloo_run|mpi_run|js_run|run_task|elastic.driver|elastic.registration|"
    "elastic.rendezvous|elastic.settings|http.http_server|http.http_client|util.threads|"
    "util.streams|util.network|util.lsf|util.cache|util.remote|common.service.driver_service|"
    "common.service.task_service|common.service.compute_service|common.util.config_parser|"
    "common.util.host_hash|common.util.safe_shell_exec|common.util.secret|common.util.settings|"
    "common.util.timeout|common.util.network|common.util.codec>"
)
ESTIMATORS = "horovod.spark.<common.backend|common.store|keras|torch|lightning|data_loaders>"
TABLES = {}
TABLES["plain"] = """
horovod.common.basics
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
        <mpi|gloo|ddl|ccl|cuda|rocm|nccl>_built
    start_timeline => (file_path, mark_cycles=False)
    <stop_timeline|is_homogeneous|mpi_threads_supported|mpi_enabled|gloo_enabled> => ()
    [Average, Sum, Adasum, Min, Max, Product] => [0, 1, 2, 3, 4, 5]
    mpi_threads_supported() => raises ValueError
horovod.common.process_sets
    ProcessSet.<size|rank|included> => ()
    ProcessSet([0]).<process_set_id|size()|rank()|included()|mpi_comm> => None
    ProcessSet([1, 1]).ranks => [1, 1]
    ProcessSet(<list|tuple|set|iter|dict.fromkeys>([1, 0])).ranks => [0, 1]
    ProcessSet(<None|'01'|[0.5]>) => raises ValueError
    [word in str(ProcessSet([3])) for word in ('None', '[3]')] => [True, True]
    [global_process_set.process_set_id, global_process_set.ranks] => [0, [0]]
    remove_process_set(<global_process_set|ProcessSet([0])>) => False
    add_process_set([0]) => raises ValueError
horovod.common.exceptions
    HostsUpdatedInterrupt(skip_sync=True).skip_sync => True
    HorovodVersionMismatchError => (name, version, installed_version)
    get_version_mismatch_message => (name, version, installed_version)
    issubclass(<HorovodInternalError|HostsUpdatedInterrupt>, RuntimeError) => True
    issubclass(HorovodVersionMismatchError, ImportError) => True
horovod.common.elastic
    notification_manager <State|ObjectState>.register_reset_callbacks
    State => (bcast_object, get_rank)
    ObjectState => (bcast_object, get_rank, **kwargs)
    run_fn => (func, reset)
    <State|ObjectState>.<commit|save|restore|sync|reset|on_reset|check_host_updates> => ()
    <State|ObjectState>.on_hosts_updated => (timestamp, update_res)
    type('Own', (State,), {})(None, None).save() => raises NotImplementedError
horovod.common.util
    <extension_available|gpu_available> => (ext_base_name, verbose=False)
    <mpi|gloo|nccl|ddl|ccl>_built => (verbose=False)
    check_extension => (ext_name, ext_env_var, pkg_path, *args)
    env => (**kwargs)
    split_list => (l, n)
    get_average_backwards_compatibility_fun => (reduce_ops)
    is_version_greater_equal_than => (ver, target)
    check_installed_version => (name, version, exception=None)
    EXTENSIONS => ['tensorflow', 'torch', 'mxnet']
horovod.data
    BaseDataLoader.<__len__|_iterate|__iter__> => ()
    BaseDataLoader()._process_batch(3) => 3
    AsyncDataLoaderMixin => (async_loader_queue_size=64, debug_data_loader=False, *args, **kwargs)
    AsyncDataLoaderMixin.close_async_loader => ()
horovod.runner
    _HorovodArgs
    run => (func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None,
        slots=None, reset_limit=None, cooldown_range=None, hosts=None, hostfile=None,
        host_discovery_script=None, start_timeout=None, ssh_port=None, ssh_identity_file=None,
        disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None,
        mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None,
        min_np=None, max_np=None)
horovod.runner.launch
    _run _run_elastic run_controller is_gloo_used
    <run_commandline|parse_args> => ()
    parse_args(['-np', '2', 'x']).<nics|output_filename|config_file|ssh_port|ssh_identity_file|
        slots|fusion_threshold_mb|min_num_proc|max_num_proc|elastic_timeout|reset_limit|
        cooldown_range|no_stall_check|log_with_timestamp|mpi_args|binding_args|hostfile|
        host_discovery_script> => None
    parse_args(['-np', '2', 'x']).<disable_cache|verbose|tcp_flag|prefix_output_with_timestamp>
        => False
    parse_args(['-np', '2', 'x']).start_timeout => 30
    parse_args(['--blacklist-cooldown-range', '2', '9', 'x']).cooldown_range => [2, 9]
horovod.runner.common.util.env
    is_exportable(<'BASH_FUNC_x'|'OLDPWD'|'CUDA_VISIBLE_DEVICES'|'_HOROVOD_SECRET_KEY'>) => False
horovod.runner.common.util.hosts
    parse_host_files
    parse_hosts(<'a'|'a:'|'[::1]:2'>) => raises ValueError
horovod.runner.elastic.discovery
    <HostDiscovery|HostDiscoveryScript|FixedHosts>.find_available_hosts_and_slots => ()
    FixedHosts => (host_slots)
horovod.runner.elastic.worker
horovod.runner.elastic.constants
    RESET_LIMIT_EXCEEDED_MESSAGE.count('{}') => 1
"""
TABLES["plain"] += PARTS
TABLES["torch"] = """
horovod.torch
    <start|stop>_timeline mpi_threads_supported <mpi|gloo>_enabled <mpi|gloo|ddl|ccl|rocm>_built
    SyncBatchNorm => (num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
    allgather_object => (obj, name=None)
    Compression.<none|fp16>.compress => (tensor)
    Compression.<none|fp16>.decompress => (tensor, ctx)
    Compression.fp16.compress(torch.ones(1))[0].dtype => torch.float16
    Compression.fp16.compress(torch.ones(1).int())[0].dtype => torch.int32
    DistributedOptimizer(sgd(), compression=Own).step() => None
    optimizer.<synchronize|skip_synchronize|zero_grad> => ()
    optimizer.step => (closure=None)
    optimizer.load_state_dict(optimizer.state_dict()) => None
    optimizer.skip_synchronize().__enter__() => None
    DistributedOptimizer(sgd()).set_backward_passes_per_step(2) => None
    [isinstance(optimizer, torch.optim.SGD), type(optimizer).__name__] => [True, 'SGD']
    type(optimizer).__module__ => 'horovod.torch.optimizer'
    DistributedOptimizer(sgd(), groups=<2|[list(model.parameters())]>).step() => None
    broadcast_parameters(<model.state_dict()|list(model.named_parameters())|
        list(model.parameters())>, 0) => None
horovod.torch.compression
    Compressor.compress => (tensor)
    Compressor.decompress => (tensor, ctx)
    issubclass(Compression.<none|fp16>, Compressor) => True
horovod.torch.elastic
    TorchState.register_reset_callbacks
    run => (func)
    TorchState => (model=None, optimizer=None, **kwargs)
    TorchState.<commit|save|restore|sync|reset|on_reset|check_host_updates> => ()
    TorchState.on_hosts_updated => (timestamp, update_res)
horovod.torch.elastic.sampler
    ElasticSampler => (dataset, shuffle=True, seed=0)
    ElasticSampler.<state_dict|reset|__iter__|__len__> => ()
    ElasticSampler.set_epoch => (epoch)
    ElasticSampler.record_batch => (batch_idx, batch_size)
    sampler.<dataset|epoch|seed|shuffle|num_replicas|rank|remaining_indices|processed_num|
        num_samples|total_size|indices>
    sampler.load_state_dict({'epoch': 0, 'processed_num': 0}) => None
    sampler.state_dict() => {'epoch': 0, 'processed_num': 0}
horovod.torch.elastic.state
    <StateHandler|ModelStateHandler|OptimizerStateHandler|SamplerStateHandler>.<save|restore|sync>
        => ()
    get_handler_registry => ()
    set_handler_registry => (registry)
    [kind.__name__ for kind, _ in get_handler_registry()] =>
        ['Module', 'Optimizer', 'ElasticSampler']
"""
TABLES["tensorflow"] = """
horovod.tensorflow
    <start|stop>_timeline mpi_threads_supported <mpi|gloo>_enabled elastic <ddl|ccl|rocm>_built
    DistributedOptimizer(old()).<compute_gradients|apply_gradients|minimize|variables>
    DistributedOptimizer(<old()|keras.optimizers.SGD(0.1)>).register_local_var
    PartialDistributedGradientTape(tf.GradientTape(), local_layers=<[1]|1>) => raises ValueError
    issubclass(Compression.<none|fp16>, compression.Compressor) => True
horovod.tensorflow.elastic
    <TensorFlowKerasState|TensorFlowState>.register_reset_callbacks
    <TensorFlowKerasState|TensorFlowState>.<commit|save|restore|sync|reset|on_reset|
        check_host_updates> => ()
    <TensorFlowKerasState|TensorFlowState>.on_hosts_updated => (timestamp, update_res)
    TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)])) => raises ValueError
horovod.tensorflow.data.compute_worker
horovod.tensorflow.data.compute_service
    TfDataServiceConfig.compute_client => (verbose=1)
    TfDataServiceConfig.write => (filename)
    TfDataServiceConfig.read => (filename, wait_for_file_creation=False)
    tf_data_service => (compute_config, rank)
    compute_worker_fn => (compute_config)
    tf.data.Dataset.send_to_data_service is send_to_data_service => True
    setattr(TfDataServiceConfig(1, 1, 'compute', {}, b'k'), 'timeout', 3) => raises AttributeError
    (lambda c: TfDataServiceConfig.from_dict(c.to_dict()) == c)(
        TfDataServiceConfig(1, 2, 'training', {'lo': [('127.0.0.1', 1)]}, b'k', 3)) => True
horovod.<keras|tensorflow.keras>
    Average Sum elastic.KerasState.register_reset_callbacks
        callbacks.BroadcastGlobalVariablesCallback(0).register_local_var
        callbacks.BestModelCheckpoint().filepath
        DistributedOptimizer(keras.optimizers.SGD(0.1)).register_local_var
    <callbacks.BroadcastGlobalVariables|callbacks.MetricAverage|callbacks.LearningRateSchedule|
        callbacks.LearningRateWarmup|elastic.CommitState|elastic.UpdateBatchState|
        elastic.UpdateEpochState>Callback.on_batch_<begin|end> => (batch, logs=None)
    <callbacks.BroadcastGlobalVariables|callbacks.MetricAverage|callbacks.LearningRateSchedule|
        callbacks.LearningRateWarmup|elastic.CommitState|elastic.UpdateBatchState|
        elastic.UpdateEpochState>Callback.on_epoch_<begin|end> => (epoch, logs=None)
    heard(callbacks.BroadcastGlobalVariablesCallback, 0) => ['begin', 'end']
    heard(callbacks.MetricAverageCallback) => ['begin', 'end']
    heard(callbacks.LearningRateScheduleCallback, 0.1, 1.0) => ['begin', 'end']
    heard(callbacks.LearningRateWarmupCallback, 0.1, 5, True, 1) => ['begin', 'end']
    heard(elastic.<Commit|UpdateBatch|UpdateEpoch>StateCallback, state) => ['begin', 'end']
    broadcast_by_hand(callbacks.BroadcastGlobalVariablesCallback(0)) => True
    elastic.<KerasState|CommitStateCallback>.commit => ()
    elastic.KerasState.<save|restore|sync|reset|on_reset|check_host_updates> => ()
    elastic.KerasState.on_hosts_updated => (timestamp, update_res)
    type(DistributedOptimizer(keras.optimizers.SGD(0.1))).__name__ => 'SGD'
horovod._keras
"""
TABLES["ray"] = """
horovod.ray
    BaseHorovodWorker
    RayExecutor => (settings, num_workers=None, num_hosts=None, num_workers_per_host=1,
        cpus_per_worker=1, use_gpu=False, gpus_per_worker=None, use_current_placement_group=True,
        min_workers=None, max_workers=None, reset_limit=None, cooldown_range=None,
        elastic_timeout=600, override_discovery=True)
    RayExecutor.create_settings => (timeout_s=30, ssh_identity_file=None, ssh_str=None,
        placement_group_timeout_s=100, nics=None)
    RayExecutor.start => (executable_cls=None, executable_args=None, executable_kwargs=None,
        extra_env_vars=None)
    RayExecutor.run => (fn, args=None, kwargs=None, callbacks=None)
    RayExecutor.run_remote => (fn, args=None, kwargs=None)
    RayExecutor.execute => (fn, callbacks=None)
    RayExecutor.execute_single => (fn)
    ElasticRayExecutor => (settings, use_gpu=False, cpus_per_slot=1, gpus_per_slot=None,
        env_vars=None, override_discovery=True)
    ElasticRayExecutor.create_settings => (min_num_proc=1, max_num_proc=None, reset_limit=None,
        elastic_timeout=600, timeout_s=30, ssh_identity_file=None, nics=None, min_np=None,
        max_np=None, **kwargs)
    <RayExecutor.shutdown|ElasticRayExecutor.start> => ()
    ElasticRayExecutor.run => (worker_fn, callbacks=None)
horovod.ray.elastic
    <RayHostDiscovery|TestDiscovery>.find_available_hosts_and_slots => ()
horovod.ray.elastic_v2
horovod.ray.ray_logger
    configure log
horovod.ray.strategy
    PGStrategy ColocatedStrategy create_placement_group
"""
TABLES["spark"] = """
horovod.spark
    run => (fn, args=(), kwargs={}, num_proc=None, start_timeout=None, use_mpi=None,
        use_gloo=None, extra_mpi_args=None, env=None, stdout=None, stderr=None, verbose=1,
        nics=None, prefix_output_with_timestamp=False, executable=None)
    run_elastic => (fn, args=(), kwargs={}, num_proc=None, min_num_proc=None, max_num_proc=None,
        start_timeout=None, elastic_timeout=None, reset_limit=None, env=None, stdout=None,
        stderr=None, verbose=1, nics=None, prefix_output_with_timestamp=False, min_np=None,
        max_np=None)
horovod.spark.task
    get_available_devices => ()
horovod.spark.conf
"""
TABLES["spark"] += ESTIMATORS

BY_CHOICE = {
    f"{PARTS}: ": "the launcher is another program; its flags are the same",
    f"{ESTIMATORS}: ": "there are no estimators",
    "horovod._keras: ": "private",
    "horovod.common.process_sets: ProcessSet([1, 1]).ranks": "is refused at once",
    "horovod.common.elastic: type('Own', (State,), {})(None, None).save()": "is refused at once",
    "horovod.runner: _HorovodArgs": "private, and there is no such class",
    "horovod.runner.launch: <_run|run_controller|is_gloo_used>": "parts of its launcher",
    "horovod.runner.launch: parse_args(['-np', '2', 'x']).start_timeout": "None stands for 60",
    "horovod.torch: type(optimizer).__module__": "the optimizer stays the object that it was",
}

SETUP = {}
SETUP["plain"] = "from horovod.common import basics; basics.init()"
SETUP["torch"] = """
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
sgd = lambda: torch.optim.SGD(model.parameters(), 0.1)
Own = type("Own", (hvd.Compression.none,), {})
optimizer = hvd.DistributedOptimizer(sgd(), model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(5))
"""
SETUP["tensorflow"] = """
import types, keras, tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
old = lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1)
state = types.SimpleNamespace(epoch=0, batch=0, commit=lambda: None)
def heard(kind, *arguments):  # by a subclass that overrides both, when Keras calls its methods
    calls = []
    callback = type("Own", (kind,), {
        f"on_batch_{at}": lambda *_, at=at, **__: calls.append(at) for at in ("begin", "end")
    })(*arguments)
    callback.set_model(model)
    callback.set_params({"steps": 2})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    callback.on_train_batch_end(0)
    return calls
def broadcast_by_hand(callback):  # as loops of a script's own do
    callback.set_model(model)
    callback.on_batch_end(0)
    return callback.broadcast_done
"""
ANSWER = """
import importlib, inspect, json, sys

def parameter(each):
    text = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name
    return text if each.default is each.empty else f"{text}={each.default!r}"

def answer(module, row, given):
    try:
        module = importlib.import_module(module)
        lazy = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        found = eval(row or "'there'", {**vars(module), **lazy, **given})
    except Exception as error:
        return f"raises {' '.join(kind.__name__ for kind in type(error).__mro__)}: {error}"
    if not callable(found):
        return repr(found)
    parameters = inspect.signature(found).parameters.values()
    return [parameter(each) for each in parameters if each.name not in ("self", "cls")]

setup, rows = json.load(sys.stdin)
given = {}
exec(setup, given)
print(json.dumps({m: {row: answer(m, row, given) for row in rows[m]} for m in rows}))
"""


def each_of(text: str) -> list[str]:
    """``text`` with each of what is written <a|b>."""
    parts = re.split(r"<([^<>]*\|[^<>]*)>", text)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def rows_of(group: str) -> dict[str, dict[str, str]]:
    """By module and expression what is expected; "" for what is only to be there."""
    found = {}
    for block in re.split(r"\n(?=\S)", TABLES[group].strip()):
        modules, *lines = re.split(r"\n {4}(?! )", block)
        rows = {"": ""}
        for line in lines:
            line = re.sub(r"(?<=\|)\s+|\s+(?=>)", "", " ".join(line.split()))
            row, arrow, expected = (part.strip() for part in line.partition("=>"))
            names = [row] if arrow else row.split()
            rows |= dict.fromkeys(itertools.chain.from_iterable(map(each_of, names)), expected)
        found |= dict.fromkeys(each_of(modules.replace(" ", "")), rows)
    return found


@functools.cache
def answers(group: str) -> subprocess.CompletedProcess[str]:
    """What a new interpreter finds for all rows: one for each framework."""
    rows = {module: list(rows) for module, rows in rows_of(group).items()}
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", ANSWER],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": path},
        input=json.dumps([SETUP.get(group, ""), rows]),
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip


def fits(expected: str, found: str | list[str]) -> bool:
    """Whether Horovod's scripts are served; there may be more parameters, and more defaults."""
    if isinstance(found, str) and found.startswith("raises "):
        return expected.startswith("raises ") and expected[7:] in found.partition(":")[0].split()
    if isinstance(found, str) or not expected.startswith("("):
        return expected in ("", found)
    parts = [part for part in expected[1:-1].split(", ") if part]
    known = [o if "=" in p else o.partition("=")[0] for p, o in zip(parts, found, strict=False)]
    return known == parts and all("=" in ours for ours in found[len(parts) :])


def marks(group: str) -> list[pytest.MarkDecorator]:
    """Skipped without its framework, of which PyTorch is in the shorter runs of tests, too."""
    needed = {"plain": "", "tensorflow": "tensorflow keras", "spark": "pyspark"}.get(group, group)
    found = [] if group in ("plain", "torch") else [pytest.mark.frameworks]
    for name in needed.split():
        found.append(pytest.mark.skipif(not is_installed(name), reason=f"{name} is not installed"))
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("group", "module"),
    [pytest.param(g, module, marks=marks(g)) for g in TABLES for module in rows_of(g)],
)
def test_what_horovod_has(group: str, module: str) -> None:
    done = answers(group)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])[module]
    wrong = {
        f"{module}: {row}": f"\n{module}: {row} is {found[row]}, not {expected or 'there'}"
        for row, expected in rows_of(group)[module].items()
        if not fits(expected, found[row])
    }
    chosen = {each for row in BY_CHOICE for each in each_of(row) if each.startswith(f"{module}: ")}
    assert chosen <= wrong.keys(), "no differences any more"
    assert chosen >= wrong.keys(), "".join(text for row, text in wrong.items() if row not in chosen)
