"""Puzzles of Sudoku and bit strings are what they are said to be; recipes train as said, and two streams are two."""

import dataclasses
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.puzzles import contenders, prefix, recipes, sudoku, training, two_streams  # noqa: E402
from benchmarks.puzzles.models import Shape  # noqa: E402
from benchmarks.puzzles.sudoku import LARGE, MIDDLE, SMALL, Sudoku  # noqa: E402
from implicit_attention.studies.thinking.grids import every_grid, puzzles_of, unique  # noqa: E402

BOARDS = [SMALL, MIDDLE, LARGE]


@pytest.fixture(autouse=True)
def small_pool(monkeypatch):
    """Fewer grids to dig, and none that a test before or behind this one has dug."""
    monkeypatch.setattr(sudoku, "POOL", 100)
    tasks = [vars(plan.task) for plan in sudoku.PLANS]
    for task in tasks:
        task.pop("pool", None)
    yield
    for task in tasks:
        task.pop("pool", None)


def units_of(board):
    """All rows, columns and boxes as lists of cells, written out."""
    side, rows, columns = board.side, range(0, board.side, board.height), range(0, board.side, board.width)
    lines = [[(r, c) for c in range(side)] for r in range(side)] + [[(r, c) for r in range(side)] for c in range(side)]
    boxes = [
        [(r + i, c + j) for i in range(board.height) for j in range(board.width)]
        for r, c in itertools.product(rows, columns)
    ]
    return [[r * side + c for r, c in unit] for unit in lines + boxes]


def is_complete(board, grid):
    return all(sorted(grid[cell] for cell in unit) == list(range(board.side)) for unit in units_of(board))


def solutions(board, grid):
    """How many solutions a puzzle has, -1 being empty, by search; 2 for more."""
    units = units_of(board)
    peers = [{c for unit in units if cell in unit for c in unit} for cell in range(board.cells)]

    def search(grid):
        free = {
            cell: set(range(board.side)) - {grid[other] for other in peers[cell]}
            for cell in range(board.cells)
            if grid[cell] < 0
        }
        if not free:
            return 1
        cell, found = min(free, key=lambda c: len(free[c])), 0
        for digit in free[cell]:
            found += search([*grid[:cell], digit, *grid[cell + 1 :]])
            if found > 1:
                break
        return min(found, 2)

    return search(list(grid))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: f"{board.side}")
def test_units_and_peers_are_those_of_the_rules(board):
    expected = torch.zeros(3, board.cells, board.cells, dtype=torch.bool)
    for number, unit in enumerate(units_of(board)):
        for cell in unit:
            expected[number // board.side, cell, unit] = True
    assert torch.equal(board.together(), expected)
    assert torch.equal(board.peers(), expected.any(0) & ~torch.eye(board.cells, dtype=torch.bool))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: f"{board.side}")
def test_symmetries_make_complete_grids_of_complete_grids(board):
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    grids = torch.tensor([sudoku.filled(board, draw) for _ in range(20)])
    source, names = sudoku.rearranged(board, 20, generator)
    others = names.gather(1, grids.gather(1, source))
    assert all(is_complete(board, grid) for grid in grids.tolist() + others.tolist())
    assert len({tuple(grid) for grid in others.tolist()}) > 15
    assert all(sorted(row) == list(range(board.cells)) for row in source.tolist())


def test_there_are_288_small_grids_and_1072_puzzles_of_4_givens_up_to_names():
    grids = every_grid()
    assert grids.shape == (288, 16)
    assert len({tuple(grid) for grid in grids.tolist()}) == 288
    assert all(is_complete(SMALL, grid) for grid in grids.tolist())
    # 25,728 puzzles, 24 names each; none has fewer givens.
    givens = sum(torch.arange(2**16) >> bit & 1 for bit in range(16))
    found = unique()
    assert [int(found[:, givens == k].sum()) for k in (3, 4)] == [0, 1072]


@pytest.mark.parametrize(("board", "givens"), [(SMALL, 4), (SMALL, 6), (MIDDLE, 13), (LARGE, 35)])
@pytest.mark.parametrize("test", [False, True])
def test_a_puzzle_has_one_solution_and_as_many_givens_as_asked_for(board, givens, test):
    puzzles = Sudoku(board, (givens,)).puzzles(givens, 12, torch.Generator().manual_seed(1), test=test)
    assert puzzles.grids.shape == puzzles.given.shape == (12, board.cells)
    for grid, given in zip(puzzles.grids.tolist(), puzzles.given.tolist(), strict=True):
        assert sum(given) == givens
        assert is_complete(board, grid)
        assert solutions(board, [d if known else -1 for d, known in zip(grid, given, strict=True)]) == 1
    assert len({tuple(grid) for grid in puzzles.grids.tolist()}) > 8


def test_small_puzzles_with_a_fixed_seed_are_apart_from_those_to_learn_from():
    task = Sudoku(SMALL, (6, 7))
    for givens in (4, 6):
        sets = []
        for test in (False, True):
            found = puzzles_of(givens, test)
            named = sudoku.renamed(found.grids)
            assert torch.equal(named[:, :4], torch.arange(4).expand(len(named), 4))
            sets.append({(*g, *k) for g, k in zip(named.tolist(), found.given.tolist(), strict=True)})
        assert not sets[0] & sets[1]
        assert 0.19 < len(sets[1]) / (len(sets[0]) + len(sets[1])) < 0.21
    assert torch.equal(task.test("4 givens", 9).inputs, Sudoku(SMALL, (6,)).test("4 givens", 9).inputs)


@pytest.mark.parametrize(("board", "givens"), [(MIDDLE, 14), (LARGE, 40)])
def test_larger_grids_to_test_with_are_not_learnt_from_whatever_the_digits_are_called(board, givens):
    task, generator = Sudoku(board, (givens,)), torch.Generator().manual_seed(3)
    learnt, asked = (task.puzzles(givens, count, generator, test=test).grids for count, test in ((3000, 0), (200, 1)))
    sets = [{tuple(grid) for grid in sudoku.renamed(grids).tolist()} for grids in (learnt, asked)]
    assert not sets[0] & sets[1]
    other = torch.rand(len(asked), board.side, generator=generator).argsort(-1).gather(1, asked)
    assert sudoku.held_out(asked).all()
    assert sudoku.held_out(other).all()
    assert not sudoku.held_out(learnt).any()


def test_forced_digits_are_those_of_singles():
    # The second row has one cell left, and the third row one for 0 beneath the others' zeros.
    grid = [0, 1, 2, 3, 2, 3, 0, 1, 1, 0, 3, 2, 3, 2, 1, 0]
    known = F.one_hot(torch.tensor(grid), 4).float()[None]
    known[0, [4, 8, 9, 12, 13]] = 0
    naked, both = (sudoku.forced(SMALL, known, hidden=hidden)[0] for hidden in (False, True))
    peers = [{c for unit in units_of(SMALL) if cell in unit for c in unit} - {cell} for cell in range(16)]
    left = {4, 8, 9, 12, 13}
    for cell in range(16):
        free = set(range(4)) - {grid[c] for c in peers[cell] - left}
        expected = free if cell in left and len(free) == 1 else set()
        assert set(naked[cell].nonzero().flatten().tolist()) == expected
        assert set(both[cell].nonzero().flatten().tolist()) >= expected
    assert int(both.sum()) > int(naked.sum()) > 0
    assert all(grid[cell] == digit for cell, digit in both.nonzero().tolist())


def test_guesses_are_the_givens_and_what_naked_singles_make_of_them():
    examples = Sudoku(MIDDLE, (14,)).test("13 givens", 20)
    known = examples.inputs[..., :7].argmax(-1)
    assert torch.equal(sudoku.givens(examples), (known - 1).clamp(min=0))
    peers = [{c for unit in units_of(MIDDLE) if cell in unit for c in unit} - {cell} for cell in range(36)]
    for row, found, target in zip(known.tolist(), sudoku.singles(examples), examples.targets, strict=True):
        grid = [digit - 1 for digit in row]
        for _, cell in itertools.product(range(36), range(36)):
            free = set(range(6)) - {grid[other] for other in peers[cell]}
            grid[cell] = free.pop() if grid[cell] < 0 and len(free) == 1 else grid[cell]
        assert [max(digit, 0) for digit in grid] == found.tolist()
        assert all(a in (-1, b) for a, b in zip(grid, target.tolist(), strict=True))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: f"{board.side}")
def test_cells_are_told_their_givens_and_their_place(board):
    task = Sudoku(board, (board.cells // 2,))
    examples = task.draw(5, torch.Generator().manual_seed(0))
    digits = examples.inputs[..., : board.side + 1]
    assert bool((digits.sum(-1) == 1).all())
    assert int((digits[..., 0] == 0).sum()) == 5 * (board.cells // 2)
    known = digits.argmax(-1)
    assert bool((known[known > 0] - 1 == examples.targets[known > 0]).all())
    asked = task.test(f"{board.cells // 2} givens", 5)
    assert asked.inputs.shape == examples.inputs.shape == (5, board.cells, task.shape.features)
    assert torch.equal(training.Examples.dense(asked).edges, examples.edges)
    if board != SMALL:
        assert torch.equal(examples.edges[0], board.peers() | torch.eye(board.cells, dtype=torch.bool))


# ------------------------------------------------------------------ recipes


def test_two_streams_draw_an_answer_from_drafts():
    torch.manual_seed(0)
    model = two_streams.Reasoner(Shape(features=21, classes=4, dim=8, heads=2), cycles=3)
    inputs, edges = torch.randn(2, 16, 21), torch.ones(2, 16, 16, dtype=torch.bool)
    x, net = model.embed(inputs), model.block.block.high.block
    given = inputs @ model.embed.weight.T + model.embed.bias
    high, low = torch.randn(2, 16, 8), torch.randn(2, 16, 8)
    found = model.block(torch.cat([high, low], -1), x, edges)
    for _ in range(3):
        low = net(given + high + low, 0, edges)
    high = net(high + low, 0, edges)
    torch.testing.assert_close(found, torch.cat([high, low], -1))
    torch.testing.assert_close(model.head(found), high @ model.head.weight.T + model.head.bias)


def counting(model):
    seen = []
    model.block.register_forward_hook(lambda module, given, made: seen.append((given[0], made)))
    return seen


def test_segments_go_on_from_a_detached_state_and_reach_the_weights_in_each():
    task = sudoku.TASK
    model = contenders.model_of(task, recipes.CONTENDERS[0], 0)
    seen, batch = counting(model), task.draw(3, torch.Generator().manual_seed(0))
    made = []
    for z in training.Segments(2, 3).states(model, batch, random.Random(0), 1.0):
        model.zero_grad()
        training.loss(model, z, batch.targets).backward()
        assert model.embed.weight.grad.abs().max() > 0
        made.append(z)
    assert len(seen) == 6
    assert not seen[0][0].any()
    for number in (1, 2):
        start = seen[2 * number][0]
        assert not start.requires_grad
        torch.testing.assert_close(start, made[number - 1].detach())
    assert seen[1][0].requires_grad


def test_noise_and_damping_of_segments_are_of_the_size_that_is_told():
    task = sudoku.TASK
    model = contenders.model_of(task, recipes.CONTENDERS[0], 0)
    seen, batch = counting(model), task.draw(64, torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    with torch.no_grad():
        states = list(
            training.Segments(2, 2, start=3.0, noise=0.5, keep=0.75).states(model, batch, random.Random(0), 1.0)
        )
    assert float(seen[0][0].std()) == pytest.approx((3.0**2 + 0.5**2) ** 0.5, rel=0.05)
    torch.testing.assert_close(seen[1][0], 0.25 * seen[0][0] + 0.75 * seen[0][1])
    assert float((seen[2][0] - states[0]).std()) == pytest.approx(0.5, rel=0.05)


def test_a_loss_at_half_the_steps_is_the_mean_of_both():
    task = sudoku.TASK
    model = contenders.model_of(task, recipes.CONTENDERS[0], 0)
    batch = task.draw(4, torch.Generator().manual_seed(0))
    (both,) = recipes.Intermediate(range(5, 6)).states(model, batch, random.Random(0), 1.0)
    x = model.embed(batch.inputs)
    two, five = (model.steps(torch.zeros_like(x), x, batch.edges, count) for count in (2, 5))
    expected = sum(training.loss(model, z, batch.targets) for z in (two, five)) / 2
    torch.testing.assert_close(training.loss(model, both, batch.targets), expected)


@pytest.mark.slow
def test_a_penalty_is_the_mean_square_of_the_jacobian():
    task, seed = Sudoku(SMALL, (12,)), 3
    model = contenders.model_of(task, recipes.CONTENDERS[0], 0)
    batch = task.draw(1, torch.Generator().manual_seed(0))
    found = []
    for number in range(40):
        torch.manual_seed(seed + number)
        ((z, added),) = recipes.Penalised(0.5).states(model, batch, random.Random(0), 1.0)
        found.append(float(added.detach()))
    x = model.embed(batch.inputs).detach()
    squares = []
    for z_one, x_one, edges in zip(z.detach(), x, batch.edges, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda flat, x=x_one, e=edges: model.block(flat.view(1, 16, 32), x[None], e[None]).flatten(),
            z_one.flatten(),
        )
        squares.append(jacobian.square().sum() / (16 * 32))
    assert sum(found) / 40 == pytest.approx(0.5 * float(sum(squares)), rel=0.1)
    added.backward()
    assert model.block.attention.project.weight.grad.abs().max() > 0


def test_bounded_maps_have_spectral_norms_of_one_at_most_and_are_solved():
    torch.manual_seed(0)
    model = recipes.bounded(sudoku.TASK.shape).eval()
    with torch.no_grad():
        model.block.mlp[0].weight = 3 * torch.randn(64, 32)
    maps = [module.weight.detach() for module in model.block.modules() if isinstance(module, torch.nn.Linear)]
    assert len(maps) == 4
    norms = [float(torch.linalg.matrix_norm(weight, 2)) for weight in maps]
    assert max(norms) <= 1
    assert norms[2] > 0.9
    answer, _ = training.answered(model, sudoku.TASK.test("4 givens", 4), training.Solved())
    assert bool(answer.converged.all())


@pytest.mark.slow
@pytest.mark.parametrize("plan", [sudoku.PLANS[1], prefix.PLAN, recipes.PLAN], ids=lambda plan: plan.metric)
def test_every_contender_answers_in_a_quick_run(plan):
    plan = plan.quick()
    for contender in plan.contenders:
        # The comparison of all solvers has its own test.
        contender = dataclasses.replace(contender, solvers=False, ways=contender.ways[:2])
        found = contenders.trial(plan, contender, 0)
        assert all(set(sets) == set(plan.sets) for sets in found["ways"].values())
        assert set(found["ways"]) == {way.name for way in contender.ways} or set(found["ways"]) == {"guess"}


def test_a_bound_on_puzzles_that_have_not_settled_holds_where_all_have():
    claims = {claim.field: claim for claim in sudoku.PLAN.claims}
    found = {"exact": 0.9, "exact_converged": 0.95, "exact_unconverged": None}
    runs = [{"ways": {"solved": {"4 givens": found}}}]
    assert contenders.lower(runs, claims["exact_unconverged"]) == 0.0
    assert contenders.lower(runs, claims["exact_converged"]) == 0.95
    found.update(exact_converged=None, exact_unconverged=0.2)
    assert contenders.lower(runs, claims["exact_unconverged"]) == 0.2
    assert contenders.lower(runs, claims["exact_converged"]) is None


def test_a_few_updates_learn_what_singles_find():
    task = Sudoku(SMALL, (12,))
    model = contenders.model_of(task, recipes.CONTENDERS[0], 0)
    told = training.train(task, model, training.Recipe(training.Loop(4), updates=40, batch=32), 0)
    assert told["loss"] < 1.2
