"""What is proposed for whole scripts: each change, its reason, and what is left to the user."""

from __future__ import annotations

import pytest
from migrated import cases, expected_file, proposed, text

from kolovod.errors import InvalidArgumentError
from kolovod.migrate.proposal import Outcome, propose

OTHERS = {
    "ddp_on_gpus": Outcome.UNKNOWN,
    "horovod_keras": Outcome.NOTHING_LEFT,
    "horovod_tensorflow": Outcome.NOTHING_LEFT,
    "horovod_torch": Outcome.NOTHING_LEFT,
    "kolovod_torch": Outcome.NOTHING_LEFT,
    "lightning_fit": Outcome.UNKNOWN,
    "no_framework": Outcome.UNKNOWN,
}
"""Scripts in which nothing changes."""


@pytest.mark.parametrize(("name", "rename"), cases())
def test_a_script(name: str, rename: bool) -> None:
    assert text(name, rename) == expected_file(name, rename).read_text()
    made = proposed(name, rename)
    if not rename:
        assert made.outcome is OTHERS.get(name, Outcome.CHANGES)
    if made.outcome is Outcome.CHANGES:
        compile(made.new, name, "exec")
        again = propose(made.new, name)
        assert again.outcome is Outcome.NOTHING_LEFT
        assert again.new == made.new


def changed(code: str) -> str:
    """The code that is proposed in the place of this."""
    return propose(code.encode(), "train.py").new.decode()


def looks(code: str) -> list[tuple[int, str]]:
    """Line and text of what is left to the user."""
    made = propose(code.encode(), "train.py")
    return [(each.line, each.text) for each in made.needs + made.looks]


HEAD = """\
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(8, 1)
"""
LOOP = """\
for epoch in range(3):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
LOADER = "loader = DataLoader(data, batch_size=4, shuffle=True)\n"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("lr=rate", "lr=rate * kv.size()"),
        ("lr=args.lr", "lr=args.lr * kv.size()"),
        ("lr=base + 1", "lr=base + 1)"),  # nothing that needs parentheses is touched
        ("0.1", "0.1 * kv.size()"),
    ],
)
def test_a_learning_rate(given: str, wanted: str) -> None:
    optimizer = f"optimizer = torch.optim.SGD(model.parameters(), {given})\n"
    assert wanted in changed(HEAD + LOADER + optimizer + LOOP)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("DataLoader(data, 4, shuffle=flag)", "DataLoader(data, 4, sampler=sampler)"),
        ("DataLoader(data)", "DataLoader(data, sampler=sampler)"),
        ("DataLoader(data, sampler=None)", None),
        ("DataLoader(data, sampler=own)", None),
        ("DataLoader(data, batch_sampler=own)", None),
        ("DataLoader(data, 4, True, own)", None),
        ("DataLoader(*given)", None),
        ("DataLoader(data, **given)", None),
        ("[DataLoader(part) for part in data][0]", None),
    ],
)
def test_a_loader(given: str, wanted: str | None) -> None:
    code = f"{HEAD}loader = {given}\n{OPTIMIZER}{LOOP}"
    if wanted is None:
        assert "DistributedSampler(" not in changed(code)
        assert any(
            line == 5 and ("left as it is" in text or "cannot be seen" in text)
            for line, text in looks(code)
        )
    else:
        assert f"loader = {wanted}\n" in changed(code)
        assert "    loader.sampler.set_epoch(epoch)\n" in changed(code)
    order = "flag" if "flag" in given else "False"
    assert (f"rank=kv.rank(), shuffle={order})" in changed(code)) == (wanted is not None)


def test_only_the_loader_that_is_trained_on_is_shared() -> None:
    test = "other = DataLoader(test_data, batch_size=4, shuffle=True)\n"
    code = changed(HEAD + LOADER + test + OPTIMIZER + LOOP)
    assert test in code
    assert "loader = DataLoader(data, batch_size=4, sampler=sampler)" in code


def test_a_name_that_only_looks_like_a_loader() -> None:
    own = "class DataLoader(list):\n    pass\n\n"
    code = f"import torch\n{own}model = torch.nn.Linear(8, 1)\n{LOADER}{OPTIMIZER}{LOOP}"
    assert LOADER in changed(code)


def test_names_that_the_script_uses_already() -> None:
    code = changed(f"{HEAD}kv = sampler = None\n{LOADER}{OPTIMIZER}{LOOP}")
    assert "import kolovod.torch as kolovod_torch\n" in code
    assert "kolovod_torch.init()\n" in code
    assert (
        "sampler_of_rank = DistributedSampler(\n    data, num_replicas=kolovod_torch.size()" in code
    )


def test_an_iterable_dataset() -> None:
    own = "class Stream(torch.utils.data.IterableDataset):\n    pass\n\ndata = Stream()\n"
    code = HEAD + own + LOADER + OPTIMIZER + LOOP
    assert LOADER in changed(code)
    assert any("IterableDataset takes no sampler" in text for _, text in looks(code))


def test_two_statements_in_a_line_stay_together() -> None:
    code = f"{HEAD}data = make(); {LOADER}{OPTIMIZER}{LOOP}"
    assert f"data = make(); {LOADER}" in changed(code)
    assert any(line == 5 and "give it a line" in text for line, text in looks(code))


@pytest.mark.parametrize(
    ("printed", "alone"),
    [
        ("loss.item()", True),
        ("f'{total / len(loader):.2f}', round(time, 2)", True),
        ("evaluate(model)", False),
        ("next(batches)", False),
        ("torch.randn(3)", False),
    ],
)
def test_a_print_that_does_something_stays_on_all_ranks(printed: str, alone: bool) -> None:
    code = changed(f"{HEAD}{LOADER}{OPTIMIZER}{LOOP}    print({printed})\n")
    assert (f"if kv.rank() == 0:\n        print({printed})" in code) == alone
    assert f"print({printed})\n" in code


def test_the_world_is_formed_before_functions_that_run_on_import() -> None:
    body = "\n".join(f"    {line}" for line in (LOADER + OPTIMIZER + LOOP).splitlines())
    main = f"\ndef main(model, data):\n{body}\n\n"
    guard = 'if __name__ == "__main__":\n    main(model, None)\n'
    assert '"__main__":\n    kv.init()\n    main' in changed(HEAD + main + guard)
    early = changed(f"{HEAD}{main}main(model, [])\n{guard}")
    assert "\n\nkv.init()\n" in early
    assert "    kv.init()\n" not in early


def test_imports_that_end_at_a_try() -> None:
    head = "try:\n    import torch\nexcept ImportError:\n    raise SystemExit(2) from None\n"
    loop = f"model = torch.nn.Linear(8, 1)\n{OPTIMIZER}model(x).backward()\n"
    code = changed(head + loop)
    assert code.startswith(f"{head}import kolovod.torch as kv\n\nkv.init()\n")


def test_a_framework_that_only_a_function_imports() -> None:
    code = "def main():\n    import torch\n    model = torch.nn.Linear(8, 1)\n"
    code += "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    code += "    model(x).backward()\n\nmain()\n"
    assert any("not imported at the top" in text for _, text in looks(code))
    assert changed(code) == code


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_process_groups(backend: str) -> None:
    head = "import torch.distributed as dist\n"
    assert changed(f"{head}dist.init_process_group('{backend}', rank=r)\n") == (
        f"{head}dist.init_process_group('kolovod', rank=r)\n"
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("r'gloo'", "'kolovod'"), ('U"mpi"', '"kolovod"'), ('"""gloo"""', '"""kolovod"""')],
)
def test_a_backend_in_other_quotes(given: str, wanted: str) -> None:
    head = "import torch.distributed as dist\n"
    assert changed(f"{head}dist.init_process_group({given})\n") == (
        f"{head}dist.init_process_group({wanted})\n"
    )


def test_a_gpu_in_other_quotes_is_seen() -> None:
    code = "import torch.distributed as dist\ndist.init_process_group('gloo')\nx.to(r'cuda')\n"
    assert changed(code) == code
    assert any("this script uses GPUs" in text for _, text in looks(code))


def test_a_backend_that_is_not_seen_stays() -> None:
    code = "import torch.distributed as dist\ndist.init_process_group(args.backend)\n"
    made = propose(code.encode(), "train.py")
    assert made.outcome is Outcome.UNKNOWN
    assert made.new == code.encode()
    assert made.needs[0].line == 2


def test_no_python_is_named_with_its_line() -> None:
    with pytest.raises(InvalidArgumentError, match=r"train\.py, line 2, is not valid Python"):
        propose(b"import torch\nfor x in:\n", "train.py")
    with pytest.raises(InvalidArgumentError, match=r"train\.py is not a text of Python"):
        propose(b"# caf\xe9\n", "train.py")


def test_rename_is_for_scripts_of_horovod() -> None:
    with pytest.raises(InvalidArgumentError, match="--rename"):
        propose(b"import torch\n", "train.py", rename=True)


@pytest.mark.parametrize(
    ("used", "renamed"),
    [
        ("hvd.allreduce(x, op=hvd.Sum)", True),
        ("hvd.allreduce(x, average=False)", False),
        ("hvd.allreduce(x, False)", False),
        ("hvd.broadcast_parameters(p, root_rank=0)", True),
        ("hvd.broadcast_optimizer_state(o, root_rank=0, model=m)", False),
        ("hvd.nccl_built()", False),
        ("hvd.DistributedOptimizer(o, compression=hvd.Compression.fp16)", True),
        ("hvd.DistributedOptimizer(o, num_groups=2)", False),
        ("hvd.elastic.run(f)", False),
        ("f(hvd)", False),
    ],
)
def test_what_is_renamed(used: str, renamed: bool) -> None:
    code = f"import horovod.torch as hvd\nhvd.init()\n{used}\n"
    new = propose(code.encode(), "train.py", rename=True).new.decode()
    assert new.startswith("import kolovod.torch as hvd\n") == renamed
    assert new.partition("\n")[2] == code.partition("\n")[2]


@pytest.mark.parametrize(
    ("encoding", "newline"),
    [("utf-8", "\r\n"), ("latin-1", "\n"), ("utf-8-sig", "\r\n"), ("cp1252", "\r\n")],
)
def test_encodings_and_ends_of_lines(encoding: str, newline: str) -> None:
    declared = "" if encoding.startswith("utf") else f"# -*- coding: {encoding} -*-\n"
    comment = f"{declared}# café\n".replace("\n", newline)
    code = comment + f"{HEAD}{LOADER}{OPTIMIZER}{LOOP}".replace("\n", newline)
    new = propose(code.encode(encoding), "train.py").new
    text = new.decode(encoding)
    assert text.startswith(comment)
    assert "kv.init()" in text
    assert text.count("\n") == text.count(newline)
    old_lines = [
        line for line in code.split(newline) if "SGD" not in line and "Loader(" not in line
    ]
    assert [line for line in old_lines if line not in text.split(newline)] == []


def test_tabs_stay_tabs() -> None:
    loop = (LOOP + "    print(epoch)\n").replace("    ", "\t")
    code = changed(HEAD + LOADER + OPTIMIZER + loop)
    assert "\tloader.sampler.set_epoch(epoch)\n" in code
    assert "\tif kv.rank() == 0:\n\t\tprint(epoch)\n" in code


def test_what_is_read_from_a_checkpoint_is_to_be_equal_on_all_ranks() -> None:
    script = """\
import tensorflow as tf

model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.1)
checkpoint = tf.train.Checkpoint(model=model)
checkpoint.restore(tf.train.latest_checkpoint("."))
for x in tf.data.Dataset.from_tensor_slices(tf.ones((8, 4))).batch(2):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""
    assert any(line == 6 and "broadcast_variables" in text for line, text in looks(script)), looks(
        script
    )


@pytest.mark.parametrize(
    ("module", "is_keras"),
    [
        ("keras.models", True),
        ("keras.saving", True),
        ("tensorflow.keras.models", True),
        ("mlflow.pyfunc", False),
        ("joblib_models", False),
    ],
)
def test_only_models_of_keras_are_read_by_its_load_model(module: str, is_keras: bool) -> None:
    script = f"""\
import keras
from {module} import load_model

model = keras.Sequential([keras.layers.Dense(1)])
other = load_model("other")
model.compile("sgd", "mse")
model.fit(x, y)
"""
    code = changed(script)
    assert "DistributedOptimizer" in code
    assert ("other = kv.load_model(" in code) == is_keras
    assert ("other = load_model(" in code) != is_keras


EPOCHS = """\
for epoch in range(3):
    for i in range(0, 800, 20):
        optimizer.zero_grad()
        model(x[i : i + 20]).mean().backward()
        optimizer.step()
"""
TORCH = f"{HEAD}{LOADER}{OPTIMIZER}"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (HEAD + OPTIMIZER + EPOCHS, "zip(*[iter(range(0, 800, 20))] * kv.size())"),
        (
            HEAD + OPTIMIZER + EPOCHS.replace("0, 800, 20", "n").replace("i : i + 20", "i::20"),
            "for i in range(kv.rank(), n // kv.size() * kv.size(), kv.size()):",
        ),
        (f"{HEAD}total = 3 * len(data) // 4\n{LOADER}{OPTIMIZER}{LOOP}", "// 4 // kv.size()\n"),
        (
            f"{TORCH}s = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1)\n{LOOP}",
            "max_lr=0.1 * kv.size()",
        ),
        (
            f"{HEAD}more = {{'shuffle': True}}\nloader = DataLoader(data, **more)\n"
            f"{OPTIMIZER}{LOOP}",
            'sampler=sampler, **{**more, "shuffle": False})',
        ),
        (
            f"{HEAD}loader = DataLoader(data, sampler=torch.utils.data.RandomSampler(data))\n"
            f"{OPTIMIZER}{LOOP}",
            "shuffle=True)",
        ),
        (
            f"{HEAD}drawn = torch.utils.data.WeightedRandomSampler(w, 80)\n"
            f"loader = DataLoader(data, sampler=drawn)\n{OPTIMIZER}{LOOP}",
            "(w, 80 // kv.size(), generator=torch.Generator().manual_seed(kv.rank()))",
        ),
        (
            f"{HEAD}x = torch.randn(8, 8)\n{LOADER}{OPTIMIZER}{LOOP}",
            "torch.manual_seed(kv.broadcast_object(torch.initial_seed(), root_rank=0))",
        ),
        (
            f"{TORCH}{LOOP}torch.save(model.state_dict(), 'm')\n"
            "model.load_state_dict(torch.load('m'))\n",
            "kv.barrier()\nmodel.load_state_dict(",
        ),
        (
            f"{HEAD}norm = torch.nn.BatchNorm1d(8)\n{LOADER}{OPTIMIZER}{LOOP}",
            "\n    kv.broadcast_parameters(model.named_buffers())",
        ),
        (
            f"{TORCH}{LOOP}    if judge(model) > 0.9:\n        break\n",
            "if kv.broadcast_object(bool(judge(model) > 0.9), root_rank=0):",
        ),
        (
            f"{HEAD}w = torch.zeros(8, requires_grad=True)\n"
            "optimizer = torch.optim.Adam([w], lr=0.1)\nw.sum().backward()\n",
            'kv.broadcast_parameters({"w": w})',
        ),
        (
            f"{HEAD}def make():\n    return torch.optim.Adam(model.parameters())\n"
            f"optimizer = make()\n{LOADER}{LOOP}",
            "    kv.broadcast_parameters(model.state_dict())\n    return",
        ),
        (
            "import jax, optax\ntx = optax.MultiSteps(optax.adam(0.1), 4)\nstate = tx.init(p)\n",
            "optax.MultiSteps(kv.DistributedOptimizer(optax.adam(0.1)), 4)",
        ),
        (
            "import jax, optax\ntx = optax.sgd(optax.cosine_decay_schedule(0.1, 9))\n"
            "state = tx.init(p)\n",
            "cosine_decay_schedule(0.1 * kv.size(), 9)",
        ),
        (
            "from keras.models import Sequential\nmodel = Sequential()\n"
            "model.compile('adam', 'mse')\nmodel.fit(x[:9], y[:9])\n",
            "import keras\n",
        ),
        (
            "import keras\nmodel = keras.Sequential()\nmodel.compile('adam', 'mse')\n"
            "model.fit(x[:9], y[:9])\nmodel = keras.models.load_model('m.keras')\n",
            "kv.barrier()\nmodel = kv.load_model(",
        ),
    ],
)
def test_what_the_corpus_has_shown(code: str, wanted: str) -> None:
    assert wanted in changed(code)


def test_what_is_read_after_training_leaves_the_first_broadcast_before_it() -> None:
    code = changed(f"{TORCH}{LOOP}model.load_state_dict(torch.load('m'))\n")
    assert code.index("broadcast_parameters") < code.index("for epoch")


def test_a_schedule_that_is_stepped_in_each_batch_is_left_to_the_user() -> None:
    made = "s = torch.optim.lr_scheduler.StepLR(optimizer, 100)\n"
    code = TORCH + made + LOOP
    stepped = code.replace("optimizer.step()\n", "optimizer.step()\n        s.step()\n")
    assert any("divide its counts" in text for _, text in looks(stepped))
    assert not any("divide its counts" in text for _, text in looks(code))
