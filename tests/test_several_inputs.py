"""Modules of several inputs: against one joined input, and against plain passes of the user's own module."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bnn_pyro as bp
from bnn_pyro.errors import UserError

RNG = np.random.default_rng(0)
NUM = 60
IMAGE, META = RNG.normal(5, 2, (NUM, 1, 3, 3)).astype(np.float32), RNG.normal(size=(NUM, 2)).astype(np.float32)
WORDS = RNG.integers(0, 7, (NUM, 4))
Y = META[:, 0] + IMAGE[:, 0, 0, 0] + 0.1 * RNG.normal(size=NUM)


@pytest.fixture(autouse=True)
def seeded():
    """Modules draw their initial weights."""
    with bp.isolated(0):
        yield


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Two(Joined):
    def forward(self, image: Tensor, meta: Tensor) -> Tensor:
        return self.layer(torch.cat([image.flatten(1), meta], 1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 3), nn.Linear(5, 1)

    def forward(self, words: Tensor, meta: Tensor) -> Tensor:
        assert words.dtype == torch.int64
        assert words.shape[1:] == (4,)
        return self.head(torch.cat([self.words(words).mean(1), meta], 1))


def test_two_inputs_are_fitted_as_one_that_joins_them():
    """Nothing but the way in is another: the same draws, to the bit."""
    one, two = Joined(), Two()
    two.load_state_dict(one.state_dict())
    joined = np.concatenate([IMAGE.reshape(NUM, -1), META], 1)
    method = bp.SVI(epochs=5)
    sets = bp.dataset(joined, Y), bp.dataset((IMAGE, META), Y), bp.dataset({"meta": META, "image": IMAGE}, Y)
    assert torch.equal(sets[0].x_train, sets[1].x_train)
    first, second = (bp.fit(bp.Bayesian(net), data, method) for net, data in zip((one, two), sets, strict=False))
    for site, draws in first.draw(4, seed=0).items():
        assert torch.equal(draws, second.draw(4, seed=0)[site])
    by_name = bp.fit(bp.Bayesian(two), sets[2], method)
    x = sets[2].schema.unstandardise(sets[2].x_test)
    given = {"image": x[:, 2:].reshape(-1, 1, 3, 3).numpy(), "meta": x[:, :2].numpy()}  # in another order
    torch.testing.assert_close(bp.predict(by_name, given).mean, bp.predict(by_name, sets[2].x_test).mean)


def test_whole_numbers_reach_an_embedding_as_they_are(tmp_path):
    data = bp.dataset({"words": WORDS, "meta": META}, Y, task="regression")
    pixels = bp.dataset({"image": IMAGE.astype(np.uint8), "meta": META}, Y, task="regression")
    assert pixels.schema.x_scale[0] != 1 and not pixels.schema.input_parts[0].is_whole
    assert data.schema.x_scale[:4] == (1.0,) * 4
    net = Words()
    posterior = bp.fit(bp.Bayesian(net), data, bp.SVI(epochs=3))
    prediction, draws = bp.predict(posterior, data.x_test, num_draws=5), posterior.draw(5, seed=0)
    words, meta = data.x_test[:, :4].long(), data.x_test[:, 4:]
    for s in range(5):  # plain passes of the user's own module
        weights = {name: draws[name][s] for name, _ in net.named_parameters()}
        plain = functional_call(net, weights, (words, meta)).squeeze(-1)
        expected = data.schema.y_shift + data.schema.y_scale * plain
        torch.testing.assert_close(prediction.components.loc[s], expected, rtol=1e-4, atol=1e-4)
    posterior.save(tmp_path / "posterior")
    loaded = bp.load(tmp_path / "posterior", module=Words())
    again = bp.predict(loaded, {"words": WORDS[:3], "meta": META[:3]}, num_draws=5)
    same = bp.predict(posterior, {"meta": META[:3], "words": WORDS[:3]}, num_draws=5)
    assert torch.equal(again.components.loc, same.components.loc)


GAP = np.where(np.arange(NUM)[:, None] == 2, np.float32("nan"), META)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({"words": WORDS[:9], "meta": META}, "different numbers of rows ('words' 9, 'meta' 60)"),
        ({"words": WORDS.astype(str), "meta": META}, "X['words'] is no array of numbers"),
        ({"words": WORDS + 2**25, "meta": META}, "X['words'] has whole numbers above 2^24"),
        (({"words": WORDS}, META), "X['0'] is no array of numbers"),
        ({"words": WORDS + 7, "meta": META}, "index that it has not"),
        ({"words": WORDS[:, :2], "meta": META}, "'words': (2, 2)"),
    ],
)
def test_inputs_that_cannot_be_fitted_are_refused_in_a_line(x, words):
    with pytest.raises(UserError) as error:
        bp.fit(bp.Bayesian(Words()), bp.dataset(x, Y), bp.SVI(epochs=1))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_new_rows_that_training_did_not_have_are_refused():
    posterior = bp.fit(bp.Bayesian(Words()), bp.dataset({"words": WORDS, "meta": META}, Y), bp.SVI(epochs=1))
    for x, words in (
        ({"meta": META}, r"X has the inputs 'meta' \(N, 2\); this model takes 'words' \(N, 4\)"),
        ({"words": WORDS, "meta": GAP}, r"X\[2, 4\] is nan|x\[2, 4\] is nan"),
        ({"words": WORDS + 0.5, "meta": META}, r"X\['words'\] must be whole numbers"),
        ({"words": WORDS + 7, "meta": META}, "index that it has not"),
        ([WORDS, META], "is no tuple or dict"),
    ):
        with pytest.raises(UserError, match=words):
            bp.predict(posterior, x)
