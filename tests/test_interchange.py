"""Packed weights: conventions converted exactly, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, draw

from rnnlab import cells, gates, interchange, scan
from rnnlab.interchange import PYTORCH, Convention

pytestmark = pytest.mark.usefixtures("x64")

X_BTD = np.array([1.0, -1.0, 0.5]).reshape(1, 3, 1)
GRU = {
  "weight_ih": np.array([[0.5], [-0.4], [-0.3], [0.6], [0.8], [-0.7]]),
  "weight_hh": np.array(
    [[0.2, -0.1], [0.3, 0.4], [0.1, 0.5], [-0.2, 0.3], [0.6, -0.5], [0.4, 0.7]]
  ),
  "bias_ih": np.array([0.1, -0.1, 0.05, 0.2, -0.2, 0.15]),
  "bias_hh": np.array([0.03, -0.02, -0.04, 0.06, 0.0, 0.0]),
}
LSTM = {
  "weight_ih": np.array([0.4, -0.2, 0.3, 0.1, -0.5, 0.6, 0.2, -0.3])[:, None],
  "weight_hh": np.array(
    [[0.1, 0.2], [-0.3, 0.4], [0.5, -0.1], [0.2, 0.3]]
    + [[0.6, -0.4], [-0.2, 0.5], [0.3, 0.1], [-0.1, 0.2]]
  ),
  "bias_ih": np.array([0.1, 0.2, 0.9, 1.1, -0.1, 0.05, 0.3, -0.2]),
  "bias_hh": np.zeros(8),
}


def convention_of(settings):
  """A convention that the cell of these settings can be read in."""
  order, name = interchange.CELLS[settings["name"]].GATES, settings["name"]
  return Convention(
    order[::-1],
    "keeps" if "z" in order else None,
    settings["reset"] if name == "gru" else None,
  )


def final(name, arrays, convention, reset=None):
  hparams = {} if reset is None else {"reset": reset}
  cell = cells.make(name, hidden=2, **hparams)
  params = interchange.from_packed(name, arrays, convention, reset)
  return scan.unroll(cell, params, X_BTD)[0]


@pytest.mark.parametrize(
  "reset, h",
  [("after", [-0.045045, 0.208539]), ("before", [-0.030751, 0.201595])],
)
def test_gru_reference_under_both_resets(reset, h):
  h_BH = final("gru", GRU, PYTORCH["gru"]._replace(reset=reset), reset)
  np.testing.assert_allclose(h_BH, [h], atol=1e-6)


@pytest.mark.parametrize("reset", ["before", "after"])
def test_keeping_is_replacing_with_the_z_rows_negated(reset):
  keeps = Convention("rzc", "keeps", reset)
  negated = {key: a.copy() for key, a in GRU.items()}
  for a in negated.values():
    a[2:4] *= -1
  assert_close(
    final("gru", negated, keeps._replace(update="replaces"), reset),
    final("gru", GRU, keeps, reset),
    atol=0,
  )


def test_lstm_reference():
  h_BH, c_BH = final("lstm", LSTM, PYTORCH["lstm"])
  np.testing.assert_allclose(h_BH, [[-0.163248, 0.053789]], atol=1e-6)
  np.testing.assert_allclose(c_BH, [[-0.282099, 0.130916]], atol=1e-6)


@pytest.mark.parametrize(
  "order, h",
  [("iqfo", [0.397280, 0.288265]), ("ifoq", [0.173530, -0.158463])],
)
def test_another_lstm_order_fits_and_is_wrong(order, h):
  # Shapes cannot tell: only the declared order makes the difference.
  wrong, _ = final("lstm", LSTM, Convention(order))
  np.testing.assert_allclose(wrong, [h], atol=1e-6)
  arrays = {key: gates.reorder(a, "ifqo", order) for key, a in LSTM.items()}
  assert_close(
    final("lstm", arrays, Convention(order)),
    final("lstm", LSTM, PYTORCH["lstm"]),
    atol=0,
  )


def test_transposed_square_blocks_would_be_seen():
  blocks = np.split(LSTM["weight_hh"], 4)
  turned = {**LSTM, "weight_hh": np.concatenate([b.T for b in blocks])}
  h_BH, _ = final("lstm", turned, PYTORCH["lstm"])
  np.testing.assert_allclose(h_BH, [[-0.165308, 0.066644]], atol=1e-6)


def test_both_biases_act():
  split = {**LSTM, "bias_hh": np.linspace(-1, 1, 8)}
  split["bias_ih"] = LSTM["bias_ih"] - split["bias_hh"]
  assert_close(
    final("lstm", split, PYTORCH["lstm"]),
    final("lstm", LSTM, PYTORCH["lstm"]),
  )


def test_the_second_candidate_bias_is_scaled_by_the_reset():
  arrays = {key: np.zeros_like(a) for key, a in GRU.items()}
  arrays["bias_hh"][4:] = 0.8
  h_BH = final("gru", arrays, PYTORCH["gru"], "after")
  h = 0.0
  for _ in range(3):
    h = 0.5 * h + 0.5 * np.tanh(0.5 * 0.8)
  np.testing.assert_allclose(h_BH, [[h, h]], atol=1e-12)


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("bias", [True, False])
def test_to_packed_is_the_inverse(settings, bias):
  name, reset = settings["name"], settings.get("reset")
  params = draw(cells.make(hidden=3, bias=bias, **settings), 2)
  convention = convention_of(settings)
  arrays = interchange.to_packed(name, params, convention, reset)
  assert set(arrays) == set(LSTM if bias else ["weight_ih", "weight_hh"])
  back = interchange.from_packed(name, arrays, convention, reset)
  assert_close(back, jax.tree.map(np.asarray, params), atol=0)


def test_what_was_given_is_left_as_it_was():
  arrays = {key: a.copy() for key, a in GRU.items()}
  params = interchange.from_packed("gru", arrays, PYTORCH["gru"], "after")
  interchange.to_packed("gru", params, PYTORCH["gru"], "after")
  assert_close(arrays, GRU, atol=0)


@pytest.mark.parametrize("theirs, ours", [("before", "after"), ("after", None)])
def test_resets_do_not_convert(theirs, ours):
  convention = PYTORCH["gru"]._replace(reset=theirs)
  with pytest.raises(ValueError, match=f"'{theirs}'.*{ours!r}"):
    interchange.from_packed("gru", GRU, convention, ours)
  params = interchange.from_packed("gru", GRU, convention, theirs)
  with pytest.raises(ValueError, match=f"'{theirs}'.*{ours!r}"):
    interchange.to_packed("gru", params, convention, ours)


@pytest.mark.parametrize(
  "name, arrays, convention, words",
  [
    ("mgu", GRU, PYTORCH["gru"], "'mgu'"),
    ("lstm", LSTM, Convention("ifgo"), "'ifqo'.*'ifgo'"),
    ("lstm", LSTM, Convention("ifq"), "'ifqo'.*'ifq'"),
    ("lstm", LSTM, Convention("iffo"), "'ifqo'.*'iffo'"),
    ("lstm", LSTM, Convention("ifqo", "keeps"), "update.*'keeps'"),
    ("gru", GRU, Convention("rzc", None, "after"), "update.*'keeps'.*None"),
    ("gru", GRU, Convention("rzc", "keeps", "inside"), "reset.*'inside'"),
    ("gru", LSTM, PYTORCH["gru"], "8 rows.*3 gates.*2 hidden"),
    ("lstm", {**LSTM, "bias_hh": np.zeros(6)}, PYTORCH["lstm"], "bias_hh.*6"),
    ("lstm", {**LSTM, "weight_ih": np.zeros(8)}, PYTORCH["lstm"], "weight_ih"),
    ("lstm", {**LSTM, "h0": np.zeros(2)}, PYTORCH["lstm"], "'h0'"),
    ("lstm", {"weight_ih": LSTM["weight_ih"]}, PYTORCH["lstm"], "weight_hh"),
  ],
)
def test_refused_by_name(name, arrays, convention, words):
  reset = "after" if name == "gru" else None
  with pytest.raises(ValueError, match=words):
    interchange.from_packed(name, arrays, convention, reset)


def test_a_learned_carry_has_no_place_in_the_arrays():
  params = draw(cells.make("rnn", hidden=2, initial="learned"), 1)
  with pytest.raises(ValueError, match="h0_H"):
    interchange.to_packed("rnn", params, PYTORCH["rnn"])


def test_orders_are_not_guessed():
  with pytest.raises(ValueError, match="'ifqo'.*'ifgo'"):
    gates.reorder(jnp.zeros(8), "ifqo", "ifgo")
  with pytest.raises(ValueError, match="7 rows.*4 gates"):
    gates.reorder(jnp.zeros(7), "ifqo", "iqfo")
