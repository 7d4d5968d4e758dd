"""TensorFlow's ops as parts of graphs: overlap, optimizers, shapes, errors, and what is asked."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed

import kolovod
from kolovod.core.ops import Average, Max, Sum
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError, MismatchError

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def engine():
    """That of this rank."""
    return kolovod.core.world.current().engine


def while_the_other_is_late(kv, rank, function, count):
    """Rank 1 starts ``function`` only when rank 0 has all its ``count`` operations on their way."""
    results = []
    if rank == 0:
        thread = threading.Thread(target=lambda: results.append(function()))
        thread.start()
        deadline = time.monotonic() + 60
        while engine().pending() < count:
            assert time.monotonic() < deadline, engine().pending()
            time.sleep(0.002)
        assert not results
    kv.barrier("rank 0 has them all")
    if rank == 0:
        thread.join(60)
        return results[0]
    return function()


def check_all_in_flight(tf, kv, rank):
    """32 gradients of a model; and each verb several times."""
    weights = [tf.Variable(tf.fill([7, 7], 0.1)) for _ in range(32)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x)
        return [kv.allreduce(gradient) for gradient in tape.gradient(loss, weights)]

    @tf.function
    def every_verb(x):
        results = [kv.allreduce(x), kv.broadcast(x, 1), kv.allgather(x), kv.reducescatter(x)]
        return [*results, kv.alltoall(x)[0], *kv.grouped_allgather([x, x]), kv.allreduce(x)]

    x = tf.fill([2, 7], rank + 1.0)
    gradients = while_the_other_is_late(kv, rank, lambda: step(x), 32)
    assert len(gradients) == 32
    results = while_the_other_is_late(kv, rank, lambda: every_verb(x), 7)
    assert results[0].numpy()[0, 0] == results[-1].numpy()[0, 0] == 1.5
    assert [len(result) for result in results] == [2, 2, 4, 1, 2, 4, 4, 2]


def check_completion_thread(tf, kv):
    """Nodes are completed by one thread, which is not one that drives transfers."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # another thread has ended meanwhile
            names.append(path.read_text().strip())
    assert names.count("kv-completions") == 1


def check_nothing_is_optimized_away(tf, kv, rank):
    """Two that are alike, and of constants only, are run, each time."""
    row = [[rank + 1.0], [2.0]]

    @tf.function
    def twice_each():
        results = []
        for _ in range(2):
            x = tf.constant(row)
            results += [kv.allreduce(x), kv.broadcast(x, 1), kv.allgather(x), kv.reducescatter(x)]
            results += [kv.alltoall(x)[0], kv.grouped_reducescatter([x], op=Sum)[0]]
            kv.barrier()  # though nothing depends on it
        return results

    for _ in range(3):
        before = engine().stats()["operations"]
        results = twice_each()
        # Barriers last: the function returns when all that it has to run is done.
        assert engine().stats()["operations"] == before + 14
        assert [result.numpy()[0, 0] for result in results] == 2 * [
            1.5, 2.0, 1.0, 1.5 if rank == 0 else 2.0, 1.0 if rank == 0 else 2.0, [3.0, 4.0][rank],
        ]  # fmt: skip
    last = tf.function(lambda: [kv.join(), kv.join()][1])
    before = engine().stats()["operations"]
    assert last().numpy() in (0, 1)
    assert engine().stats()["operations"] == before + 2


def check_join(tf, kv, rank):
    """It waits for what stands before it, and what stands after it for it."""

    @tf.function
    def ends(x):
        before = kv.allreduce(x, "before", Sum)
        last = kv.join()
        return before, last, kv.allreduce(x, "after", Sum)

    if rank == 1:
        assert kv.allreduce(tf.ones([2]), "before", Sum).numpy().tolist() == [2, 2]
        assert kv.allreduce(tf.ones([2]), "alone", Sum).numpy().tolist() == [1, 1]
    before, last, after = ends(tf.ones([2])) if rank == 0 else (None, kv.join(), None)
    if rank == 1:
        after = kv.allreduce(tf.ones([2]), "after", Sum)
    assert int(last) == 1
    assert after.numpy().tolist() == [2, 2]
    assert before is None or before.numpy().tolist() == [2, 2]


def check_shapes(tf, kv):
    """What is known while a function is traced is what does not depend on the other ranks."""

    def shapes_of(verb, *shape):
        function = tf.function(lambda x: verb(x), input_signature=[tf.TensorSpec(shape)])
        outputs = function.get_concrete_function().outputs
        return [output.shape.as_list() for output in outputs]

    for verb in (kv.allreduce, kv.broadcast):
        for shape in ((3, 4), (None, 4), ()):
            assert shapes_of(verb, *shape) == [list(shape)]
    for verb in (kv.allgather, kv.reducescatter):
        assert shapes_of(verb, 3, 4, None) == [[None, 4, None]]
    assert shapes_of(kv.alltoall, 4, 2) == [[None, 2], [None]]
    assert shapes_of(lambda x: kv.grouped_allgather([x, x]), 5) == [[None], [None]]
    assert shapes_of(lambda x: kv.rank_op()) == [[]]
    anything = tf.function(lambda x: kv.allgather(x), input_signature=[tf.TensorSpec(None)])
    assert anything.get_concrete_function().outputs[0].shape.rank is None
    for verb in (kv.allgather, kv.reducescatter, kv.alltoall):
        with pytest.raises(ValueError, match="must be at least rank 1"):
            tf.function(verb)(tf.constant(1.0))


def check_facts(tf, kv, rank):
    """They are asked for when the graph is run."""
    asks = (kv.rank_op, kv.size_op, kv.local_rank_op, kv.local_size_op, kv.cross_rank_op)
    asks += (kv.cross_size_op, kv.process_set_included_op)
    wanted = [rank, 2, rank, 2, 0, 1, 1]
    facts = tf.function(lambda: [ask() for ask in asks])
    assert [fact.numpy() for fact in facts()] == wanted
    assert [ask().numpy() for ask in asks] == wanted
    members = kv.add_process_set([1])
    number = members.process_set_id
    included = tf.function(lambda: kv.process_set_included_op(number))
    assert included().numpy() == kv.process_set_included_op(number).numpy() == rank
    if rank == 1:
        assert tf.function(lambda: kv.size_op(number))().numpy() == 1
        assert kv.size_op(number).numpy() == 1
        x = tf.ones([2])
        assert tf.function(lambda: kv.broadcast(x, 1, process_set=members))().numpy()[0] == 1
        assert tf.function(lambda: kv.join(members))().numpy() == 1
    kv.remove_process_set(members)
    assert included().numpy() == 0
    kv.shutdown()
    with pytest.raises(tf.errors.AbortedError, match=r"call kolovod.init\(\) first"):
        facts()
    kv.init()
    assert [fact.numpy() for fact in facts()] == wanted


def check_xla(tf, kv, rank):
    """A function that XLA compiles says what to set; automatic clustering leaves ops out."""
    x = tf.fill([4], rank + 1.0)
    verbs = (kv.allreduce, kv.broadcast, kv.allgather, kv.alltoall, kv.reducescatter)
    for verb in (*verbs, lambda x: kv.rank_op(), lambda x: kv.join()):
        with pytest.raises(tf.errors.InvalidArgumentError, match="set jit_compile=False for it"):
            tf.function(verb, jit_compile=True)(x)
    square = tf.function(lambda x: x * x, jit_compile=True)
    assert tf.function(lambda x: kv.allreduce(square(x)))(x).numpy().tolist() == [2.5] * 4
    tf.config.optimizer.set_jit("autoclustering")
    mixed = tf.function(lambda x: kv.allreduce(tf.sin(x * 0) + x * x, op=Sum) * 2 + 1)
    assert mixed(x).numpy().tolist() == [11] * 4
    tf.config.optimizer.set_jit(False)


def check_slices(tf, kv, rank):
    """Sums of tf.IndexedSlices are all ranks' slices; some ranks have none."""
    slices = tf.IndexedSlices(
        tf.fill([rank, 2], 4.0), tf.fill([rank], 3), tf.constant([5, 2], tf.int32)
    )
    dense = tf.fill([2], rank + 1.0)

    def both(verb):
        return (verb, tf.function(verb))

    for reduce in both(lambda s: kv.allreduce(s, "s", Average, 0.5, 3.0)):
        total = reduce(slices)
        assert isinstance(total, tf.IndexedSlices)
        assert total.values.numpy().tolist() == [[3, 3]]
        assert total.indices.numpy().tolist() == [3]
        assert tf.convert_to_tensor(total).shape == (5, 2)
    for reduce in both(lambda s, d: kv.grouped_allreduce([s, d, s], op=Sum)):
        first, second, third = reduce(slices, dense)
        assert second.numpy().tolist() == [3, 3]
        assert first.values.numpy().tolist() == third.values.numpy().tolist() == [[4, 4]]
    integers = tf.IndexedSlices(tf.constant([1, 2]), tf.constant([0, 1]))
    assert kv.allreduce(integers, op=Sum).values.numpy().tolist() == [1, 2, 1, 2]
    for refused, op, text in (
        (slices, Max, "op Max: give Average or Sum"),
        (integers, Average, "of int32 can only be summed"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            kv.allreduce(refused, op=op)


def check_errors(tf, kv, rank):
    """The same classes of tf.errors in both modes; a mismatch leaves the world usable."""
    x = tf.ones([2, 3 + rank])
    failed = tf.errors.FailedPreconditionError
    for verb in (kv.allreduce, kv.allgather, kv.broadcast, kv.reducescatter, kv.alltoall):
        for call in (verb, tf.function(verb)):
            with pytest.raises(failed, match=r"rank 0 has \(.*3.*rank 1 has \(.*4"):
                call(x)
    with pytest.raises(MismatchError) as caught:
        kv.allreduce_async(x, op=Sum).wait()
    assert isinstance(caught.value, failed)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, failed)
    assert isinstance(again, MismatchError)
    assert str(again) == str(caught.value)
    with pytest.raises(failed, match="root"):
        tf.function(lambda x: kv.broadcast(x, rank))(tf.ones([2]))
    for splits, text in (([1, 2], "split 2 for rank 1"), ([1], "1 splits for 2 ranks")):
        for call in (kv.alltoall, tf.function(lambda x, s: kv.alltoall(x, tf.constant(s)))):
            with pytest.raises(tf.errors.InvalidArgumentError, match=text):
                call(tf.ones([2]), splits)
    invalid = tf.errors.InvalidArgumentError
    with pytest.raises(invalid, match="3 rows cannot be split evenly over 2 ranks"):
        tf.function(kv.alltoall)(tf.ones([3]))
    with pytest.raises(invalid, match="root rank 7"):
        tf.function(lambda x: kv.broadcast(x, 7))(x)
    with pytest.raises(invalid, match="op is 77"):  # AutoGraph keeps the class, and says where
        tf.function(lambda x: kv.reducescatter(x, op=77))(x)
    with pytest.raises(InvalidArgumentError, match=r"only a tf\.Variable"):
        tf.function(lambda x: kv.broadcast_(x))(x)
    assert kv.allreduce(tf.ones([1]), op=Sum).numpy() == 2


def test_ops_in_graphs():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_all_in_flight(tf, kv, rank)
        check_completion_thread(tf, kv)
        check_nothing_is_optimized_away(tf, kv, rank)
        check_join(tf, kv, rank)
        check_shapes(tf, kv)
        check_slices(tf, kv, rank)
        check_xla(tf, kv, rank)
        check_errors(tf, kv, rank)
        check_facts(tf, kv, rank)

    run_tensorflow_ranks(2, work, timeout_s=240)


def test_sets_that_overlap():
    """Ops of two sets in one graph, with ranks numbered as in the world."""

    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        outer = kv.add_process_set([0, 2])
        x = tf.constant([[rank + 1.0]])

        @tf.function
        def mixed(x):
            total = kv.allreduce(x, op=Sum)
            mine = kv.allgather(x, process_set=outer)
            sent = kv.broadcast(x, 2, process_set=outer)
            last = kv.join(outer)
            return total, mine, sent, last, kv.size_op(outer.process_set_id)

        if rank == 1:
            assert kv.allreduce(x, name="tf.kolovod", op=Sum).numpy() == 6
            return
        total, mine, sent, last, size = mixed(x)
        assert total.numpy() == 6
        assert mine.numpy().ravel().tolist() == [1, 3]
        assert (sent.numpy(), size.numpy()) == (3, 2)
        assert last.numpy() in (0, 2)

    run_tensorflow_ranks(3, work, timeout_s=120)


def test_pending_ops_end_with_a_lost_rank(tmp_path):
    """Of every verb, and the error of an eager verb says which rank it was."""

    def work(rank, done):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        x = tf.ones([2, 2])
        verbs = (kv.allreduce, kv.broadcast, kv.allgather, kv.alltoall, kv.reducescatter)
        functions = [tf.function(verb) for verb in verbs] + [
            tf.function(lambda: kv.barrier()),
            tf.function(lambda: kv.join()),
        ]
        for function in functions[:-2]:
            function(x)
        if rank == 1:
            deadline = time.monotonic() + 60
            while not done.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        done.touch()
        for function in functions:
            with pytest.raises(tf.errors.AbortedError, match=r"rank 1 .*died"):
                function(*[x][: function not in functions[-2:]])
        with pytest.raises(CollectiveAbortedError) as caught:
            kv.allgather(x)
        assert isinstance(caught.value, tf.errors.AbortedError)
        assert pickle.loads(pickle.dumps(caught.value)).rank == caught.value.rank == 1
        return "noticed"

    results = run_tensorflow_ranks(2, work, tmp_path / "done", timeout_s=120, keep_going=True)
    assert results[0] == "noticed"
