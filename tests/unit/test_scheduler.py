"""The scheduler, without a web: rows join and leave between steps, and each answer equals its solo run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from medusa.decoding import Step
from medusa.errors import UserError
from medusa.infer import Completion, Engine
from medusa.infer.serve.metrics import Metrics
from medusa.infer.serve.rows import ContextExceeded, Depths, Ended, Event, Failed, Job, Piece, Row, make_rows
from medusa.infer.serve.scheduler import Broken, Observer, QueueFull, Scheduler, Stopping, TimedOut
from medusa.testing import tiny_trunk

from .serving import CONTEXT, DRAFTERS, PROMPTS, TREE, engine, option_sets, tokenizer, trunk


class Client:
    """Submits a request, and keeps what it is told."""

    def __init__(
        self, own: Engine, prompt: str, options: dict[str, Any], *, plain: bool = False, timeout: float | None = None
    ) -> None:
        self.options = options | {"baseline": plain}
        self.prompt = prompt
        self.events: list[Event] = []
        rows = make_rows(own, [tokenizer().encode(prompt)], self.options, drafts=True)
        self.job = Job(rows, self.events.append, plain=plain, timeout=timeout)

    @property
    def ends(self) -> list[Ended]:
        return [each for each in self.events if isinstance(each, Ended)]

    @property
    def error(self) -> Exception | None:
        return next((each.error for each in self.events if isinstance(each, Failed)), None)

    def pieces(self, index: int) -> list[Piece]:
        return [each for each in self.events if isinstance(each, Piece) and each.index == index]


class Clock:
    """A time that goes by when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Notes(Observer):
    """Keeps what is observed."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.steps: list[tuple[bool, Step]] = []
        self.waited: list[float] = []
        self.first: list[float] = []

    def joined(self, row: Row, waited: float) -> None:
        self.waited.append(waited)

    def stepped(self, plain: bool, step: Step, seconds: float) -> None:
        self.steps.append((plain, step))

    def told(self, job: Job, seconds: float) -> None:
        self.first.append(seconds)

    def over(self, job: Job, outcome: str, seconds: float) -> None:
        self.outcomes.append(outcome)


def run_out(scheduler: Scheduler) -> None:
    for _ in range(2000):
        if not scheduler.waiting and not scheduler.serving:
            return
        scheduler.turn()
    raise AssertionError("it does not end")


def known(completion: Completion) -> Completion:
    """What an answer is, whoever else was served: not how long it took, nor what a limit cut from the last step."""
    return replace(completion, seconds=0.0, accepted=[], logprobs=None, top_logprobs=None)


def check_equals_solo(own: Engine, client: Client) -> None:
    found = own.generate(tokenizer().encode(client.prompt), **client.options)
    solo = found if isinstance(found, list) else [found]
    ends = sorted(client.ends, key=lambda end: end.index)
    wanted, got = [known(each) for each in solo], [known(end.completion) for end in ends]
    if own.drafter.name == "sized":  # by the rows beside: the text is the same, in as many steps as its trees take
        wanted, got = ([replace(each, steps=0) for each in side] for side in (wanted, got))
    assert got == wanted
    for end, each in zip(ends, solo, strict=True):
        pieces = client.pieces(end.index)
        assert "".join(piece.text for piece in pieces) == each.text
        assert [part for piece in pieces for part in piece.logprobs] == end.logprobs
        if each.logprobs is not None:
            bare = len(each.token_ids) - (each.finish_reason == "eos")
            assert [told.logprob for _, told in end.logprobs] == pytest.approx(each.logprobs[:bare], abs=1e-9)
            assert [token for token, _ in end.logprobs] == each.token_ids[:bare]
        for piece in pieces:
            assert "".join(text for text, _ in piece.drafts) == piece.text
            assert all(text and 0 <= depth <= (0 if client.job.plain else 30) for text, depth in piece.drafts)
        assert (pieces[-1].steps, client.events.index(end)) > (0, client.events.index(pieces[-1])) or each.steps == 0


# Equality.


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_join_and_leave_at_random_equal_their_solo_runs(name: str) -> None:
    own, sets, left = engine(name), option_sets(), 0
    for seed in range(2 if name == "medusa" else 1):
        rng = random.Random(seed)
        scheduler = Scheduler(own, rows=rng.randint(2, 6), queue=40)
        clients: list[Client] = []
        cancelled: list[Client] = []
        for _ in range(40):
            if len(clients) < 7 and rng.random() < 0.5:
                client = Client(own, rng.choice(PROMPTS), rng.choice(sets), plain=rng.random() < 0.25)
                clients.append(client)
                scheduler.submit(client.job)
            elif clients and rng.random() < 0.3:
                client = rng.choice(clients)
                if not client.job.over:
                    scheduler.cancel(client.job)
                    cancelled.append(client)
            else:
                scheduler.turn()
            assert scheduler.serving <= scheduler.rows
        run_out(scheduler)
        left += len(cancelled)
        assert len(clients) > len(cancelled)
        for client in clients:
            if client not in cancelled:
                check_equals_solo(own, client)
            else:
                assert client.job.over and client.error is None and len(client.ends) < len(client.job.rows)
    assert left


def test_drafts_are_told_by_the_depth_they_were_guessed_at() -> None:
    notes = Notes()
    scheduler = Scheduler(engine(), observer=notes)
    client = Client(engine(), PROMPTS[0], {"max_new_tokens": 25, "eos_token_id": []})
    scheduler.submit(client.job)
    run_out(scheduler)
    depths = [[depth for _, depth in piece.drafts] for piece in client.pieces(0)]
    assert max(map(max, filter(None, depths))) == TREE.depth
    accepted = [step.accepted[0] if step.nodes else 0 for _, step in notes.steps]
    for found, count in zip(depths, accepted, strict=True):
        assert set(found) <= set(range(count + 1))


def test_depths_of_a_text_that_is_cut_and_of_half_a_character() -> None:
    ids = tokenizer().encode("say 你 you")
    depths = Depths(tokenizer(), [])
    depths.push(ids[:2], 1)
    depths.push(ids[2:], len(ids))
    assert "".join(text for text, _ in depths.take("say 你")) == "say 你"
    assert [text for text, _ in depths.take(" yo")] and depths.take("") == []
    alone = Depths(tokenizer(), [])
    alone.push(tokenizer().encode("你")[:1], 1)
    assert alone.take("\ufffd") == [("\ufffd", 1)]


def test_an_eos_is_no_text_and_has_no_logprob() -> None:
    eos = trunk().model.generation_config.eos_token_id
    client = Client(engine(), "O", {"logprobs": True, "sequence_bias": {(eos,): 100.0}})
    word = tokenizer().encode("e")[0]  # a model may end by a token that is no special one
    options = {"max_new_tokens": 30, "eos_token_id": word, "sequence_bias": {(word,): 9.0}}
    bare = make_rows(engine(), [tokenizer().encode("O")], options, bare=True)
    events: list[Any] = []
    scheduler = Scheduler(engine())
    scheduler.submit(client.job)
    scheduler.submit(Job(bare, events.append))
    run_out(scheduler)
    (end,) = client.ends
    assert (end.completion.finish_reason, end.completion.text, end.logprobs) == ("eos", "", [])
    completion, solo = events[-1].completion, engine().generate(tokenizer().encode("O"), **options)
    assert completion.finish_reason == "eos" and completion.token_ids == solo.token_ids
    assert completion.text + "e" == solo.text and "".join(piece.text for piece in events[:-1]) == completion.text


# The queue.


def test_first_come_first_served() -> None:
    scheduler = Scheduler(engine(), rows=1)
    ended: list[int] = []
    clients = [
        Client(engine(), prompt, {"max_new_tokens": 4}, plain=place == 1) for place, prompt in enumerate(PROMPTS[:4])
    ]
    for place, client in enumerate(clients):
        scheduler.submit(client.job)
        client.job.deliver = lambda event, place=place: ended.append(place) if isinstance(event, Ended) else None  # type: ignore[misc]
    run_out(scheduler)
    assert ended == [0, 1, 2, 3]


def test_a_full_queue_refuses_and_has_room_again() -> None:
    scheduler = Scheduler(engine(), rows=1, queue=2)
    sampled = {"max_new_tokens": 3, "temperature": 1.0, "seed": 0}
    with pytest.raises(QueueFull, match="this request has 3 and at most 2 may wait"):
        scheduler.submit(Client(engine(), "O", sampled | {"num_return_sequences": 3}).job)
    first, second, third = (
        Client(engine(), prompt, {"max_new_tokens": 9, "eos_token_id": []}) for prompt in PROMPTS[:3]
    )
    scheduler.submit(first.job)
    scheduler.submit(second.job)
    with pytest.raises(QueueFull, match="2 rows wait"):
        scheduler.submit(third.job)
    scheduler.turn()
    assert (scheduler.serving, scheduler.waiting) == (1, 1)
    scheduler.submit(third.job)
    run_out(scheduler)
    for client in (first, second, third):
        check_equals_solo(engine(), client)


def test_a_cancelled_request_frees_its_rows_at_once() -> None:
    notes = Notes()
    scheduler = Scheduler(engine(), rows=2, observer=notes)
    long = {"max_new_tokens": 100, "temperature": 1.0, "num_return_sequences": 2, "eos_token_id": []}
    gone, waits = Client(engine(), "O", long), Client(engine(), "Ay", {"max_new_tokens": 30, "eos_token_id": []})
    scheduler.submit(gone.job)
    scheduler.submit(waits.job)
    scheduler.turn()
    assert (scheduler.serving, scheduler.waiting) == (2, 1)
    told = len(gone.events)
    scheduler.cancel(gone.job)
    scheduler.turn()
    assert (scheduler.serving, scheduler.waiting, len(gone.events)) == (1, 0, told)
    scheduler.cancel(waits.job)
    scheduler.turn()
    assert (scheduler.serving, notes.outcomes) == (0, ["cancelled", "cancelled"])
    assert not scheduler._lanes  # its cache is let go


def test_a_request_that_waits_is_cancelled_too() -> None:
    scheduler = Scheduler(engine(), rows=1)
    first, second = (Client(engine(), prompt, {"max_new_tokens": 4}) for prompt in PROMPTS[:2])
    scheduler.submit(first.job)
    scheduler.submit(second.job)
    scheduler.cancel(second.job)
    run_out(scheduler)
    assert second.events == [] and first.ends


def test_time_runs_out_for_those_who_wait_and_those_who_are_served() -> None:
    clock, notes = Clock(), Notes()
    scheduler = Scheduler(engine(), rows=1, clock=clock, observer=notes)
    endless = {"max_new_tokens": 200, "eos_token_id": []}
    served, waits = (Client(engine(), prompt, endless, timeout=5.0) for prompt in PROMPTS[:2])
    patient = Client(engine(), "Ay", {"max_new_tokens": 3})
    for client in (served, waits, patient):
        scheduler.submit(client.job)
    scheduler.turn()
    clock.now += 5.0
    scheduler.turn()
    assert not served.error and not waits.error
    clock.now += 0.5
    scheduler.turn()
    assert isinstance(served.error, TimedOut) and isinstance(waits.error, TimedOut)
    assert str(served.error) == "no whole answer within 5 seconds"
    assert not waits.pieces(0) and notes.waited == [0.0, 5.5]
    run_out(scheduler)
    check_equals_solo(engine(), patient)
    assert notes.outcomes == ["timeout", "timeout", "done"]


def test_texts_on_both_sides_of_a_change_of_frequencies_wait_for_each_other() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 40, "factor": 4.0}
    turning = tiny_trunk("llama", vocab_size=len(tokenizer()), max_position_embeddings=160, rope_parameters=rope)
    turning.tokenizer = tokenizer()
    own = Engine(turning)
    short, long = "O", "What say you, my lord? I will not hear it. " * 6
    assert len(tokenizer().encode(long)) > 40
    scheduler = Scheduler(own)
    clients = [Client(own, prompt, {"max_new_tokens": 8, "eos_token_id": []}) for prompt in (short, long, short)]
    for client in clients:
        scheduler.submit(client.job)
    scheduler.turn()
    assert (scheduler.serving, scheduler.waiting) == (1, 2)
    run_out(scheduler)
    for client in clients:
        check_equals_solo(own, client)


# What goes wrong.


def test_a_step_that_fails_ends_its_own_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, notes = Scheduler(engine(), observer=(notes := Notes())), notes
    drafted, plain = (Client(engine(), "Ay", {"max_new_tokens": 12}, plain=flag) for flag in (False, True))
    scheduler.submit(drafted.job)
    scheduler.submit(plain.job)
    scheduler.turn()
    with monkeypatch.context() as patch:
        forward = trunk().tree_forward

        def fail(tree: Any, *args: Any, **options: Any) -> Any:
            if tree.size > 1:
                raise RuntimeError("out of memory")
            return forward(tree, *args, **options)

        patch.setattr(trunk(), "tree_forward", fail)
        scheduler.turn()
    assert isinstance(drafted.error, Broken) and "RuntimeError" in str(drafted.error)
    after = Client(engine(), "Ay", {"max_new_tokens": 12})
    scheduler.submit(after.job)
    run_out(scheduler)
    check_equals_solo(engine(), plain)
    check_equals_solo(engine(), after)
    assert sorted(notes.outcomes) == ["done", "done", "error"]


def test_what_can_not_be_decoded_is_refused_before_it_waits() -> None:
    with pytest.raises(ContextExceeded, match=f"the prompt has {CONTEXT} tokens and a text may reach {CONTEXT} here"):
        make_rows(engine(), [[5] * CONTEXT], {})
    with pytest.raises(ContextExceeded, match="the prompt has 9 tokens and a text may reach 9 here"):
        make_rows(engine(), [[5] * 9], {}, context=9)
    with pytest.raises(UserError, match="frequency_penalty"):
        make_rows(engine(), [[5]], {"frequency_penalty": "x"})
    with pytest.raises(UserError, match="no tokenizer"):
        make_rows(Engine(tiny_trunk("llama")), [[5]], {})


def test_a_lower_context_ends_texts_there() -> None:
    (row,) = make_rows(engine(), [[5] * 9], {"max_new_tokens": 50, "eos_token_id": []}, context=20)
    assert row.tally.request.max_new_tokens == 11
    scheduler = Scheduler(engine())
    events: list[Any] = []
    scheduler.submit(Job([row], events.append))
    run_out(scheduler)
    assert len(events[-1].completion.token_ids) == 11 and events[-1].completion.finish_reason == "length"


# The thread.


@pytest.fixture
def threaded() -> Any:
    made: list[Scheduler] = []

    def start(**options: Any) -> Scheduler:
        made.append(Scheduler(engine(), **options))
        made[-1].start()
        return made[-1]

    yield start
    for scheduler in made:
        scheduler.stop()
        assert not scheduler.alive


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def test_clients_of_many_threads_get_their_own_answers(threaded: Callable[..., Scheduler]) -> None:
    scheduler, sets = threaded(rows=3, queue=100), option_sets()
    clients: list[Client] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(4):
            client = Client(engine(), rng.choice(PROMPTS), rng.choice(sets))
            clients.append(client)
            scheduler.submit(client.job)
            until(lambda client=client: client.job.over)  # type: ignore[misc]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clients) == 20
    for client in clients:
        check_equals_solo(engine(), client)


def test_it_stops_when_what_is_under_way_has_ended(threaded: Callable[..., Scheduler]) -> None:
    scheduler = threaded(rows=1)
    clients = [Client(engine(), prompt, {"max_new_tokens": 20}) for prompt in PROMPTS[:3]]
    for client in clients:
        scheduler.submit(client.job)
    scheduler.stop(grace=60.0)
    for client in clients:
        check_equals_solo(engine(), client)
    with pytest.raises(Stopping, match="the server is stopping"):
        scheduler.submit(clients[0].job)


def test_it_breaks_off_what_takes_longer(threaded: Callable[..., Scheduler]) -> None:
    scheduler = threaded(rows=1)
    endless = [Client(engine(), prompt, {"max_new_tokens": 240, "eos_token_id": []}) for prompt in ("O", "Ay")]
    for client in endless:
        scheduler.submit(client.job)
    until(lambda: bool(endless[0].events))
    scheduler.stop()
    assert all(isinstance(client.error, Stopping) for client in endless)


def test_nobody_waits_for_a_thread_that_a_fault_ended(
    threaded: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = threaded()
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(scheduler, "turn", lambda: 1 / 0)
    client = Client(engine(), "O", {"max_new_tokens": 3})
    scheduler.submit(client.job)
    until(lambda: not scheduler.alive)
    assert isinstance(client.error, Stopping)
    with pytest.raises(Stopping):
        scheduler.submit(client.job)


# Figures.


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_metrics_are_those_of_the_answers() -> None:
    clock, metrics = Clock(), Metrics()
    scheduler = Scheduler(engine(), rows=3, clock=clock, observer=metrics)
    metrics.watch(scheduler)
    whole = {"max_new_tokens": 16, "eos_token_id": []}
    clients = [Client(engine(), prompt, whole, plain=place == 1) for place, prompt in enumerate(PROMPTS[:4])]
    for client in clients:
        scheduler.submit(client.job)
    clock.now += 3.0
    scheduler.turn()
    assert sample(metrics, "medusa_rows") == scheduler.serving > 0
    assert sample(metrics, "medusa_waiting_rows") == 1
    run_out(scheduler)
    drafted = [end.completion for client in clients if not client.job.plain for end in client.ends]
    assert _check_counts(metrics, "on", drafted) > 0
    assert _check_counts(metrics, "off", [clients[1].ends[0].completion]) == 0
    assert sample(metrics, "medusa_steps_total", drafts="on") < sum(each.steps for each in drafted)  # shared
    assert sample(metrics, "medusa_prompt_tokens_total") == sum(
        len(client.ends[0].completion.prompt_ids) for client in clients
    )
    assert sample(metrics, "medusa_requests_total", outcome="done") == 4
    assert sample(metrics, "medusa_request_seconds_sum") == 12.0 == sample(metrics, "medusa_first_token_seconds_sum")
    text = metrics.text().decode()
    assert "# TYPE medusa_tokens_total counter" in text and 'medusa_step_seconds_bucket{kind="prefill",le=' in text


def _check_counts(metrics: Metrics, drafts: str, completions: Sequence[Completion]) -> float:
    """Hold the counters against the answers' own accounts; return the accepted tokens."""
    accepted = sum(length * count for each in completions for length, count in enumerate(each.accepted))
    assert sample(metrics, "medusa_row_steps_total", drafts=drafts) == sum(each.steps for each in completions)
    assert sample(metrics, "medusa_tokens_total", drafts=drafts) == sum(len(each.token_ids) for each in completions)
    assert sample(metrics, "medusa_accepted_tokens_total", drafts=drafts) == accepted
    assert sample(metrics, "medusa_drafted_tokens_total", drafts=drafts) >= accepted
    if drafts == "on":
        for position in range(1, TREE.depth + 1):
            deep = sum(
                count for each in completions for length, count in enumerate(each.accepted) if length >= position
            )
            assert sample(metrics, "medusa_accepted_at_position_total", position=str(position)) == deep
    return accepted
