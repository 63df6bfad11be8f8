import math

import pytest
import torch

from dapo.kernels.decode_attention import PagedState, decode_attention
from dapo.kernels.draw import DrawState, draw_and_advance
from dapo.kernels.piece_attention import CHUNK, PAGE, Pieces, piece_attention
from dapo.kernels.rotary import rotate
from dapo.kernels.sampler import draw, uniforms
from dapo.types import SamplingParams
from tests.kernels.ways import DEVICE

pytest.importorskip("triton")
both_attentions = pytest.mark.parametrize(
    "attend", [decode_attention.torch, decode_attention.triton], ids=["torch", "triton"]
)
both_draws = pytest.mark.parametrize(
    "advance", [draw_and_advance.torch, draw_and_advance.triton], ids=["torch", "triton"]
)
# (prompt, own) lengths: an empty prompt, a new own page, exactly full pages, one token more, several pages.
LENGTHS = ((0, 1), (5, 1), (PAGE, PAGE), (PAGE + 1, PAGE + 1), (3 * PAGE - 1, 2 * PAGE + 7))


class Case:
    """Random histories, stored densely for the reference and in shuffled pages whose unused slots are NaN."""

    def __init__(self, lengths=LENGTHS, heads=3, kv_heads=1, head_dim=16, dtype=torch.float32):
        torch.manual_seed(len(lengths) + heads)
        rows = len(lengths)
        needs = [(math.ceil(prompt / PAGE), math.ceil(own / PAGE)) for prompt, own in lengths]
        order = (torch.randperm(sum(map(sum, needs))) + 1).tolist()
        shape = (len(order) + 1, kv_heads, PAGE, head_dim)
        self.keys, self.values = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        self.table = torch.full((rows, max(map(sum, needs)) + 2), 10**6, dtype=torch.int32)
        self.lengths = lengths
        self.old = []
        for row, (prompt, own) in enumerate(lengths):
            history = torch.randn(2, kv_heads, prompt + own - 1, head_dim).to(dtype)
            pages = [order.pop() for _ in range(sum(needs[row]))]
            self.table[row, : len(pages)] = torch.tensor(pages)
            for t in range(prompt + own - 1):
                page, slot = self.home(row, t)
                self.keys[page, :, slot], self.values[page, :, slot] = history[:, :, t]
            self.old.append(history)
        width = (heads + 2 * kv_heads) * head_dim
        projected = torch.randn(rows, width).to(dtype).to(DEVICE)
        parts = projected.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
        self.new = [part.unflatten(-1, (-1, head_dim)) for part in parts]

    def home(self, row, t):
        """Return page and slot of token t of a row."""
        prompt, _ = self.lengths[row]
        if t < prompt:
            return int(self.table[row, t // PAGE]), t % PAGE
        return int(self.table[row, math.ceil(prompt / PAGE) + (t - prompt) // PAGE]), (t - prompt) % PAGE

    def run(self, attend, rows, scale=0.3, cos_sin=None, split=False):
        """Return the output for a batch of these rows in this order, and the caches afterwards."""
        prompts, owns = torch.tensor(self.lengths, dtype=torch.int32).T
        rows_B = torch.tensor(rows, dtype=torch.int32)
        state = PagedState(*(x.contiguous().to(DEVICE) for x in (rows_B, self.table, prompts, owns)))
        keys, values = self.keys.clone().to(DEVICE), self.values.clone().to(DEVICE)
        query, key, value = self.new if rows == [*range(len(self.lengths))] else [x[rows] for x in self.new]
        out = attend(query, key, value, keys, values, state, scale, cos_sin=cos_sin, split=split)
        return out.cpu(), keys.cpu(), values.cpu()

    def expected(self, rows, scale=0.3, cos_sin=None):
        """Return the outputs in float64 from the dense histories, and the new keys as the cache must hold them."""
        outs, new_keys = [], []
        for row in rows:
            query, key, value = (x[row].cpu() for x in self.new)
            if cos_sin is not None:
                position = sum(self.lengths[row]) - 1
                query, key = rotated(query, cos_sin, position), rotated(key, cos_sin, position)
            new_keys.append(key)
            old_keys, old_values = self.old[row].double()
            keys = torch.cat([old_keys, key[:, None].double()], dim=1)
            values = torch.cat([old_values, value[:, None].double()], dim=1)
            group = query.shape[0] // key.shape[0]
            scores = query.double()[:, None] @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
            outs.append((scores.softmax(-1) @ values.repeat_interleave(group, 0))[:, 0])
        return torch.stack(outs), torch.stack(new_keys)


def rotated(heads, cos_sin, position):
    """Rotate pairs as complex numbers, rounded to the input's dtype."""
    half = heads.shape[-1] // 2
    cos, sin = cos_sin.cpu()[position].double().split(half)
    pairs = torch.complex(heads[:, :half].double(), heads[:, half:].double()) * torch.complex(cos, sin)
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(heads.dtype)


def angles(head_dim, positions=400):
    radians = torch.arange(positions)[:, None] * 10.0 ** -torch.linspace(0, 3, head_dim // 2)
    return torch.cat([radians.cos(), radians.sin()], dim=-1).to(DEVICE)


@both_attentions
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 4), (12, 2)])
def test_attention_sees_the_prompt_the_own_tokens_and_the_newest_token(attend, heads, kv_heads):
    case = Case(heads=heads, kv_heads=kv_heads)
    rows = list(range(len(LENGTHS)))
    out, _, _ = case.run(attend, rows)
    torch.testing.assert_close(out.double(), case.expected(rows)[0], atol=2e-6, rtol=1e-5)


@both_attentions
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_any_head_size_is_supported(attend, head_dim, split):
    case, cos_sin = Case(heads=6, kv_heads=2, head_dim=head_dim), angles(head_dim)
    rows = list(range(len(LENGTHS)))
    out, _, _ = case.run(attend, rows, cos_sin=cos_sin, split=split)
    torch.testing.assert_close(out.double(), case.expected(rows, cos_sin=cos_sin)[0], atol=1e-5, rtol=1e-5)


@both_attentions
def test_the_newest_key_and_value_are_stored_and_nothing_else_changes(attend):
    case = Case(heads=4, kv_heads=2)
    rows = [3, 0, 4, 1]
    _, keys, values = case.run(attend, rows, split=True)
    for row in rows:
        page, slot = case.home(row, sum(case.lengths[row]) - 1)
        case.keys[page, :, slot], case.values[page, :, slot] = case.new[1][row].cpu(), case.new[2][row].cpu()
    torch.testing.assert_close(keys, case.keys, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(values, case.values, equal_nan=True, atol=0, rtol=0)


def test_splitting_a_response_into_chunks_changes_no_bit():
    long = ((3, 1), (PAGE * CHUNK - 5, 2), (70, PAGE * CHUNK), (2 * PAGE * CHUNK + 1, 40))
    case, cos_sin = Case(long, heads=6, kv_heads=2), angles(16, 1200)
    rows = list(range(len(long)))
    whole, _, _ = case.run(decode_attention.triton, rows, cos_sin=cos_sin)
    out, _, _ = case.run(decode_attention.triton, rows, cos_sin=cos_sin, split=True)
    torch.testing.assert_close(out.double(), case.expected(rows, cos_sin=cos_sin)[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(out, whole)


@both_attentions
def test_queries_and_the_new_key_are_rotated(attend):
    case, cos_sin = Case(heads=6, kv_heads=2), angles(16)
    rows = [4, 2, 3, 0, 1]
    out, keys, _ = case.run(attend, rows, cos_sin=cos_sin)
    expected, new_keys = case.expected(rows, cos_sin=cos_sin)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for row, key in zip(rows, new_keys, strict=True):
        page, slot = case.home(row, sum(case.lengths[row]) - 1)
        torch.testing.assert_close(keys[page, :, slot], key, atol=1e-6, rtol=1e-5)


@both_attentions
def test_attention_in_half_precision_errs_by_rounding_only(attend):
    interpreted = attend is decode_attention.triton and DEVICE == "cpu"
    dtype = torch.float16 if interpreted else torch.bfloat16  # the interpreter cannot multiply matrices of bfloat16
    cos_sin = angles(32)
    case = Case(lengths=((70, 3), (10, 66)), heads=3, head_dim=32, dtype=dtype)
    out, keys, _ = case.run(attend, [0, 1], scale=32**-0.5, cos_sin=cos_sin)
    expected, new_keys = case.expected([0, 1], scale=32**-0.5, cos_sin=cos_sin)
    assert out.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, atol=unit, rtol=2 * unit)
    for row in (0, 1):
        page, slot = case.home(row, sum(case.lengths[row]) - 1)
        torch.testing.assert_close(keys[page, :, slot], new_keys[row], atol=unit, rtol=2 * unit)


@both_attentions
def test_padding_rows_in_the_batch_do_not_affect_other_rows(attend):
    case = Case(lengths=((0, 1), (PAGE, 2), (7, PAGE + 3)))
    case.table[0, 0] = 0
    rows = [1, 0, 2, 0, 0]
    out, keys, _ = case.run(attend, rows, split=True)
    expected, new_keys = case.expected([1, 2])
    torch.testing.assert_close(out[[0, 2]].double(), expected, atol=2e-6, rtol=1e-5)
    for row, key in zip((1, 2), new_keys, strict=True):
        page, slot = case.home(row, sum(case.lengths[row]) - 1)
        assert torch.equal(keys[page, :, slot], key)


def test_a_kernel_uses_triton_on_a_gpu_and_pytorch_elsewhere():
    case = Case(lengths=((3, 2),))
    attend = decode_attention.triton if DEVICE == "cuda" else decode_attention.torch
    for found, expected in zip(case.run(decode_attention, [0]), case.run(attend, [0]), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, atol=0, rtol=0)


def draw_state(rows, capacity=8, own=1, limit=100, stops=()):
    torch.manual_seed(rows)
    state = DrawState(
        keys=torch.randint(-(2**63), 2**63 - 1, (rows,)),
        own_lengths=torch.full((rows,), own, dtype=torch.int32),
        limits=torch.full((rows,), limit, dtype=torch.int32),
        tokens=torch.full((rows, capacity), -7, dtype=torch.int32),
        logprobs=torch.full((rows, capacity), 7.0),
        finished=torch.zeros(rows, dtype=torch.int32),
        stop_ids=torch.tensor(stops, dtype=torch.int32),
    )
    return DrawState(**{name: getattr(state, name).to(DEVICE) for name in DrawState.__dataclass_fields__})


def every_row(rows):
    return torch.arange(rows, dtype=torch.int32, device=DEVICE)


def logits_of(rows, vocabulary, spread=3.0):
    torch.manual_seed(vocabulary)
    return (torch.randn(rows, vocabulary) * spread).to(DEVICE)


@pytest.mark.parametrize(("vocabulary", "temperature"), [(50, 1.0), (4096, 0.7), (10_001, 1.0), (9000, 1.3)])
def test_the_kernel_draws_the_sampler_s_token_except_at_a_rounding_boundary(vocabulary, temperature):
    rows = 40 if DEVICE == "cpu" else 2000
    logits, state, params = logits_of(rows, vocabulary), draw_state(rows, own=3), SamplingParams(temperature)
    draw_and_advance.triton(logits, every_row(rows), state, params)
    tokens, logprobs = state.tokens[:, 3].cpu().long(), state.logprobs[:, 3].cpu()
    draws = uniforms(state.keys.cpu(), torch.full((rows,), 2))
    wanted, _ = draw(logits.cpu(), draws, params)

    probabilities = (logits.cpu().double() / temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    upper = cumulative.gather(1, wanted[:, None])[:, 0]
    lower = upper - probabilities.gather(1, wanted[:, None])[:, 0]
    at_edge = torch.minimum((upper - draws).abs(), (draws - lower).abs()) < 1e-6
    assert at_edge.float().mean() < 0.05
    assert torch.equal(tokens[~at_edge], wanted[~at_edge])
    expected = probabilities.log().gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=1e-6)


@both_draws
def test_greedy_takes_the_first_likeliest_token_and_reports_its_log_probability_at_temperature_1(advance):
    logits, state = logits_of(6, 9000), draw_state(6)
    logits[0, 8990] = logits[0, 4100] = logits[0, 4096] = 50.0
    advance(logits, every_row(6), state, SamplingParams(temperature=0))
    best = logits.cpu().argmax(-1)
    assert best[0] == 4096
    assert torch.equal(state.tokens[:, 1].cpu().long(), best)
    expected = logits.cpu().double().log_softmax(-1).amax(-1)
    torch.testing.assert_close(state.logprobs[:, 1].cpu().double(), expected, atol=2e-6, rtol=1e-6)


@both_draws
def test_a_token_without_probability_is_never_drawn(advance):
    rows, possible = 20, [0, 4095, 8199]
    logits = torch.full((rows, 8300), float("-inf"), device=DEVICE)
    logits[:, possible] = torch.tensor([-90.0, 3.0, 3.0], device=DEVICE)
    state = draw_state(rows)
    advance(logits, every_row(rows), state, SamplingParams())
    assert set(state.tokens[:, 1].tolist()) == {4095, 8199}
    torch.testing.assert_close(state.logprobs[:, 1].cpu(), torch.full((rows,), math.log(0.5)))


@both_draws
def test_finished_rows_do_not_change_even_if_repeated_in_the_batch(advance):
    state = draw_state(4, capacity=3)
    state.own_lengths[0] = 3  # full
    state.finished[0] = 2
    state.finished[2] = 1
    rows_B = torch.tensor([0, 3, 0, 2, 1, 0], dtype=torch.int32, device=DEVICE)
    advance(logits_of(6, 300), rows_B, state, SamplingParams())
    assert state.own_lengths.tolist() == [3, 2, 1, 2]
    assert state.finished.tolist() == [2, 0, 1, 0]
    changed = (state.tokens != -7).tolist()
    assert changed == [[False] * 3, [False, True, False], [False] * 3, [False, True, False]]
    assert (state.logprobs != 7).tolist() == changed


@both_draws
@pytest.mark.parametrize(("stops", "outcome"), [((), [0, 0, 2]), ((5,), [0, 1, 2]), ((5, 8, 2), [1, 1, 1])])
def test_a_row_ends_at_a_stop_token_or_at_its_limit(advance, stops, outcome):
    state = draw_state(3, own=2, stops=stops)
    state.limits[2] = 2  # one token was drawn, and this step draws the second
    logits = torch.zeros(3, 9, device=DEVICE)
    logits[[0, 1, 2], [2, 5, 8]] = 100.0
    advance(logits, every_row(3), state, SamplingParams())
    assert state.tokens[:, 2].tolist() == [2, 5, 8]
    assert state.finished.tolist() == outcome
    assert state.own_lengths.tolist() == [3, 3, 3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@both_draws
def test_nan_logits_give_a_nan_log_probability_and_a_token_of_the_vocabulary(advance):
    logits = logits_of(3, 5000)
    logits[0, 4500] = math.nan
    logits[1] = math.nan
    state = draw_state(3)
    advance(logits, every_row(3), state, SamplingParams())
    assert state.logprobs[:, 1].isnan().tolist() == [True, True, False]
    assert ((state.tokens[:, 1] >= 0) & (state.tokens[:, 1] < 5000)).all()


def test_truncated_draws_use_the_sampler():
    logits, state = logits_of(50, 40), draw_state(50)
    draw_and_advance(logits, every_row(50), state, SamplingParams(1.0, 1.0, top_k=2))
    ranks = (logits > logits.gather(1, state.tokens[:, 1:2].long())).sum(-1)
    assert set(ranks.tolist()) == {0, 1}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0), SamplingParams(1.0, 0.9, 20)])
def test_a_cuda_graph_replays_the_draw_of_the_next_position(params):
    logits, rows_B, replayed, stepped = logits_of(30, 9000), every_row(30), draw_state(30), draw_state(30)
    draw_and_advance(logits, rows_B, draw_state(30), params)  # compile outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw_and_advance(logits, rows_B, replayed, params)
    for _ in range(3):
        graph.replay()
        draw_and_advance(logits, rows_B, stepped, params)
    assert torch.equal(replayed.tokens, stepped.tokens)
    assert replayed.own_lengths.tolist() == [4] * 30


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("split", [False, True])
def test_a_cuda_graph_replays_attention(split):
    case = Case(heads=6, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    rows, cos_sin = [*range(len(LENGTHS))], angles(64)

    def captured(*args, **kwargs):
        decode_attention(*args, **kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = decode_attention(*args, **kwargs)
        graph.replay()
        return out

    out, _, _ = case.run(captured, rows, cos_sin=cos_sin, split=split)
    torch.testing.assert_close(out.double(), case.expected(rows, cos_sin=cos_sin)[0], atol=0.01, rtol=0.02)


def decoded(query, key, value, prefix, cos_sin, split):
    """Return the outputs of the own tokens of [prefix | own], decoded one at a time as the sampler does."""
    length, kv_heads, head_dim = key.shape
    own = length - prefix
    pages = -(-prefix // PAGE) + -(-own // PAGE)
    keys, values = (key.new_zeros(pages + 1, kv_heads, PAGE, head_dim) for _ in range(2))
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=DEVICE)[None]
    rotated_key = key[:prefix]
    for t in range(prefix):
        keys[1 + t // PAGE, :, t % PAGE], values[1 + t // PAGE, :, t % PAGE] = rotated_key[t], value[t]
    out = []
    for t in range(own):
        lengths = (torch.tensor([count], dtype=torch.int32, device=DEVICE) for count in (prefix, t + 1))
        state = PagedState(torch.zeros(1, dtype=torch.int32, device=DEVICE), table, *lengths)
        new = (part[prefix + t : prefix + t + 1] for part in (query, key, value))
        out.append(decode_attention.triton(*new, keys, values, state, 0.2, cos_sin=cos_sin, split=split)[0])
    return torch.stack(out)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("prefix", "own", "joint"), [(0, 3, 0), (5, 70, 1), (5, 70, 67), (PAGE, 2, 1), (PAGE * CHUNK - 30, 40, 3)]
)
def test_trainer_and_sampler_attention_give_the_same_bits(prefix, own, joint, split):
    """The own tokens as one piece, or with the first of them as the joint of the others, which several pieces share."""
    if DEVICE == "cpu" and own > 3:
        own, joint = 4, min(joint, 3)  # the interpreter is slow, and does not compute products as a GPU does anyway
    dtype, heads, kv_heads, head_dim = torch.bfloat16 if DEVICE == "cuda" else torch.float32, 6, 2, 64
    generator = torch.Generator().manual_seed(prefix + own)
    parts = [torch.randn(prefix + own, h, head_dim, generator=generator) for h in (heads, kv_heads, kv_heads)]
    query, key, value = (part.to(dtype).to(DEVICE) for part in parts)
    cos_sin, positions = angles(head_dim, 600), torch.arange(prefix + own, device=DEVICE)
    both = rotate(torch.cat([query, key, value], dim=1).flatten(1), positions, cos_sin, heads, kv_heads, None)
    rotated_query, rotated_key = both.unflatten(1, (-1, head_dim)).split([heads, kv_heads], dim=1)
    table = [(0, prefix, 0, 0, 0, 0), (prefix, joint, 0, prefix, 0, 0)]
    table.append((prefix + joint, own - joint, 0, prefix, prefix, joint))
    pieces = Pieces(*torch.tensor(table, dtype=torch.int32, device=DEVICE).t().contiguous(), longest=max(prefix, own))
    found, _ = piece_attention.triton(rotated_query, rotated_key, value, pieces, 0.2)
    raw_key = torch.cat([rotated_key[:prefix], key[prefix:]])
    expected = decoded(query, raw_key, value, prefix, cos_sin, split)
    if DEVICE == "cuda":
        assert torch.equal(found[prefix:], expected)
    torch.testing.assert_close(found[prefix:], expected, atol=1e-5, rtol=1e-5)
