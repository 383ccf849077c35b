"""The price of a nonce in multiplications, from the model's shape, and what an attack saves of it.

Counted are the multiplications of the matrices and of causal attention. Norms, rotations and the
drawing of inputs are left out: a few percent of a forward. Every share is one of the honest price,
which leaves out the last layer's MLP at all positions but the last, as our servers do (ADR 8).
"""

from dataclasses import dataclass, replace

# Bits of a weight as it is served.
SERVED_BITS = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder with grouped queries and a gated MLP, of all layers alike.

    ``intermediate`` is the width of the MLP, or of all experts together that one token uses.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def queries(self) -> int:
        """Multiplications of the query and the output projection, for one token."""
        return 2 * self.hidden * self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Multiplications of the key and the value projection, for one token."""
        return 2 * self.hidden * self.kv_heads * self.head_dim

    @property
    def mlp(self) -> int:
        """Multiplications of gate, up and down projection, for one token."""
        return 3 * self.hidden * self.intermediate

    @property
    def pair(self) -> int:
        """Multiplications of attention for one token and one that it sees: score and value."""
        return 2 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Price:
    shape: ModelShape
    seq_len: int

    @property
    def honest(self) -> int:
        """What our servers compute: all but the last MLP at the positions that are not read."""
        return self._whole - self._unread_mlp if self.shape.layers else 0

    def without_layers(self, count: int) -> float:
        """The share (0 to 1) saved by leaving out ``count`` layers.

        The attack also leaves out the unread MLP of the layer that is then the last. Without any
        layer there is nothing to compute.
        """
        fewer = replace(self.shape, layers=self.shape.layers - count)
        return 1.0 - Price(fewer, self.seq_len).honest / self.honest

    def last_tokens(self, count: int) -> float:
        return 1.0 - Price(self.shape, count).honest / self.honest

    def bits(self, bits: int) -> float:
        """The share saved by matrices of ``bits`` instead of 16 bits, at most.

        Multiplications count as cheaper in proportion to the bits, which the fastest hardware
        offers if activations are rounded too. Attention has no weights and costs the same.
        """
        return (1.0 - self._attention / self.honest) * (1.0 - bits / SERVED_BITS)

    @property
    def unread_mlp(self) -> float:
        """The last MLP at unread positions, as a share of a forward that computes everything."""
        return self._unread_mlp / self._whole

    @property
    def unread_attention(self) -> float:
        """The share saved by also leaving out the last layer's queries at unread positions.

        Their scores and output projections are left out with them. Keys and values of every
        position stay, because the last position reads them.
        """
        unread = self.seq_len - 1
        # The pairs of all tokens but the last one.
        pairs = unread * self.seq_len // 2
        return (unread * self.shape.queries + pairs * self.shape.pair) / self.honest

    @property
    def _attention(self) -> int:
        pairs = self.seq_len * (self.seq_len + 1) // 2
        return self.shape.layers * pairs * self.shape.pair

    @property
    def _whole(self) -> int:
        shape = self.shape
        token = shape.queries + shape.keys + shape.mlp
        return shape.layers * self.seq_len * token + self._attention

    @property
    def _unread_mlp(self) -> int:
        return (self.seq_len - 1) * self.shape.mlp
