"""`scan.unroll` as a layer of a Flax model, in Linen and in NNX.

Any cell of rnnlab will do, a stack too (`layers.as_cell`). Masks, resets, the
carry and the fused backward pass are those of `unroll`, and so is what comes
back: (carry, out). Two layers, one of them with `reverse`, read both ways.

    layer = LinenUnroll(cells.make("gru", hidden=64), chunk=32)
    carry, h_BTH = layer(x_BTD, mask_BT=mask_BT)
"""

import jax
from flax import linen, nnx

from rnnlab import cells, scan


class LinenUnroll(linen.Module):
  """A recurrent layer of Linen; its parameters are the cell's, under "cell".

  The fields besides the cell are options of `scan.unroll`. The key of "params"
  draws the parameters, and the input's width is that of the first call.
  """

  cell: cells.Cell
  reverse: bool = False
  chunk: int | None = None
  unroll: int = 1
  bptt: str = "fused"

  @linen.compact
  def __call__(
    self, x, carry=None, *, memory=None, mask_BT=None, reset_BT=None
  ):
    """`scan.unroll` of the layer's own cell and parameters."""
    read = x.table_VD if isinstance(x, scan.Lookup) else x
    params = self.param("cell", self.cell.init, read.shape[-1])
    return scan.unroll(
      self.cell,
      params,
      x,
      carry,
      memory=memory,
      mask_BT=mask_BT,
      reset_BT=reset_BT,
      reverse=self.reverse,
      chunk=self.chunk,
      unroll=self.unroll,
      bptt=self.bptt,
    )


class NNXUnroll(nnx.Module):
  """A recurrent layer of NNX for inputs of the width d_in.

  `params` holds the cell's parameters, a `nnx.Param` each; `rngs.params` draws
  them. The other arguments are options of `scan.unroll`.
  """

  def __init__(
    self,
    cell: cells.Cell,
    d_in: int,
    *,
    rngs: nnx.Rngs,
    reverse: bool = False,
    chunk: int | None = None,
    unroll: int = 1,
    bptt: str = "fused",
  ):
    self.cell = nnx.static(cell)
    self.reverse, self.chunk, self.unroll = reverse, chunk, unroll
    self.bptt = bptt
    drawn = cell.init(rngs.params(), d_in)
    self.params = nnx.data(jax.tree.map(nnx.Param, drawn))

  def __call__(
    self, x, carry=None, *, memory=None, mask_BT=None, reset_BT=None
  ):
    """`scan.unroll` of the layer's own cell and parameters."""
    params = jax.tree.map(
      lambda param: param[...],
      self.params,
      is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return scan.unroll(
      self.cell,
      params,
      x,
      carry,
      memory=memory,
      mask_BT=mask_BT,
      reset_BT=reset_BT,
      reverse=self.reverse,
      chunk=self.chunk,
      unroll=self.unroll,
      bptt=self.bptt,
    )
