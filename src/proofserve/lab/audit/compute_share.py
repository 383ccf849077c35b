"""The price of a nonce in multiplications, from the model's shape, and what an attack saves of it.

Counted are the multiplications of the matrices and of causal attention. Norms, rotations and the
drawing of inputs are left out: a few percent of a forward. Every share is one of the honest price.
Where a scheme reads the last position alone, that leaves out the last layer's MLP at all others, as
our servers do (ADR 8).
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
    """``every_position`` says whether the scheme reads all positions, or the last alone."""

    shape: ModelShape
    seq_len: int
    every_position: bool = False

    @property
    def honest(self) -> int:
        """What our servers compute for one sequence."""
        return self._whole - self._unread_mlp if self.shape.layers else 0

    def without_layers(self, count: int) -> float:
        """The share (0 to 1) saved by leaving out ``count`` layers.

        The attack also leaves out the unread MLP of the layer that is then the last. Without any
        layer there is nothing to compute.
        """
        return self.other(replace(self.shape, layers=self.shape.layers - count))

    def other(self, shape: ModelShape) -> float:
        """The share saved by a model of another shape; 0 if it is not smaller."""
        return max(0.0, 1.0 - replace(self, shape=shape).honest / self.honest)

    def tokens(self, count: int) -> float:
        """The share saved by computing ``count`` positions alone."""
        return 1.0 - replace(self, seq_len=count).honest / self.honest

    def of_matrices(self, saved: float) -> float:
        """The share saved if the layers' matrices cost ``saved`` (0 to 1) less.

        Attention has no weights and costs the same.
        """
        return (1.0 - self._attention / self.honest) * saved

    def bits(self, bits: int) -> float:
        """The share saved by matrices of ``bits`` instead of 16 bits, at most.

        Multiplications count as cheaper in proportion to the bits, which the fastest hardware
        offers if activations are rounded too.
        """
        return self.of_matrices(1.0 - bits / SERVED_BITS)

    def cache(self, bits: int) -> float:
        """The share saved by keys and values of ``bits`` instead of 16 bits, at most."""
        return self._attention / self.honest * (1.0 - bits / SERVED_BITS)

    @property
    def first_projections(self) -> float:
        """The share of the first layer's queries, keys and values, which only the token decides."""
        shape = self.shape
        return self.seq_len * (shape.queries // 2 + shape.keys) / self.honest

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
        if self.every_position:
            return 0.0
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
        return 0 if self.every_position else (self.seq_len - 1) * self.shape.mlp
