"""Compute buffers of llama.cpp, estimated: what a device needs besides weights and caches.

The graph allocator's peak, measured with ``-lv 4`` on builds 10068 (RPC 4.0.3) and 0c1e570 (RPC
7.0.0), on the CPU, for llama, qwen3moe, qwen35moe, gpt-oss, deepseek2 and gemma3 in small, and for
the real dimensions of five presets. In f32 elements a token of the micro-batch, with hidden size H,
FFN width F, and k experts of width E a token:

- dense FFN: gate, up and their product: 3 F;
- experts: 3 k E, and k H for the down projections where those do not fit the hole that gate and up
  leave (2 k E < k H);
- attention: query and output, 2 q; latent attention (MLA): query, absorbed query, its
  concatenation with the rotary part, output;
- gated delta net: 4 times the width of its convolution;
- beside the widest of these, the residual stream: 4 H on the CPU, 3 H where the first layer is on
  another device, else 2 H (and one more for recurrent layers, whose parts leave more holes).

The last layer's FFN runs only for the rows whose logits are wanted (not where there are recurrent
layers). An attention mask of f16
(cells x micro-batch) lies on every device that has attention. Where all layers are on several
devices, builds with RPC 7 process prompts as a pipeline: they keep four copies of what enters a
device, and leave holes of about two masks between its layers. Against the logs the estimate was
mostly within 5 %, up to 15 % below for several layers and 30 % above for a single one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from linkcpp.model.memory import padded_cells
from linkcpp.model.records import LayerKind, LayerRecord, ModelInventory, TensorRecord
from linkcpp.planning.records import PlanOptions

F32_BYTES = 4
F16_BYTES = 2
PIPELINE_COPIES = 4


@dataclass(frozen=True)
class BufferSizes:
    """Bytes from which the compute buffer of any window follows.

    ``layer_bytes`` is each layer's own peak, ``mask_bytes`` the masks that it reads (full, sliding
    window). ``hidden_bytes`` is one micro-batch of hidden states, ``logits_bytes`` the logits of
    all sequences.
    """

    layer_bytes: tuple[int, ...]
    has_full_mask: tuple[bool, ...]
    has_window_mask: tuple[bool, ...]
    is_recurrent: bool
    full_mask_bytes: int
    window_mask_bytes: int
    hidden_bytes: int
    logits_bytes: int

    def masks(self, first: int, last: int) -> int:
        """Bytes of the masks that layers ``first`` to ``last - 1`` read."""
        full = self.full_mask_bytes * any(self.has_full_mask[first:last])
        return full + self.window_mask_bytes * any(self.has_window_mask[first:last])

    def device(self, first: int, last: int, *, holds_output: bool, is_pipeline: bool) -> int:
        """Bytes of the compute buffer of a device with these layers (not the coordinator's CPU)."""
        copies = PIPELINE_COPIES if is_pipeline else 1
        total = self.logits_bytes if holds_output else 0
        if first < last:
            residual = (3 if first == 0 else 2) + self.is_recurrent
            inputs = self.masks(first, last) + self.hidden_bytes
            total += max(self.layer_bytes[first:last]) + residual * self.hidden_bytes
            total += inputs * copies - self.hidden_bytes
            if is_pipeline:
                total += self.hidden_bytes
                total += 2 * self.masks(first, last) if last - first > 1 else 0
        return total

    def host(self, last: int, *, holds_output: bool, is_pipeline: bool) -> int:
        """Bytes of the coordinator's CPU buffers: inputs, its layers 0 to ``last - 1``, logits.

        The output buffer, from which the API reads logits, is here wherever the output stage is.
        """
        copies = PIPELINE_COPIES if is_pipeline else 1
        inputs = self.masks(0, len(self.layer_bytes)) + self.hidden_bytes
        total = inputs * copies + self.hidden_bytes + self.logits_bytes
        if last > 0:
            total += max(self.layer_bytes[:last]) + 2 * self.hidden_bytes
        return total + (self.logits_bytes if holds_output else 0)


def buffer_sizes(inventory: ModelInventory, options: PlanOptions) -> BufferSizes:
    """Work out the sizes for a model and options; all layers are counted, next-token ones as 0."""
    shape, layers = inventory.shape, inventory.layers
    ubatch = min(options.ubatch_tokens, options.batch_tokens)
    cells = padded_cells(options.context_tokens)
    windows = [layer.window_tokens for layer in layers if layer.window_tokens is not None]
    window_cells = min(cells, padded_cells(max(windows) + ubatch)) if windows else 0
    by_layer: dict[int, list[TensorRecord]] = {}
    for tensor in inventory.tensors:
        if tensor.layer is not None:
            by_layer.setdefault(tensor.layer, []).append(tensor)
    run = [layer for layer in layers if layer.kind is not LayerKind.NEXT_TOKEN]
    last_run = run[-1].index if run else -1
    is_recurrent = any(layer.kind is LayerKind.RECURRENT for layer in layers)
    peaks = []
    for layer in layers:
        widths = _Widths(layer, inventory, by_layer.get(layer.index, ()))
        is_short = layer.index == last_run and not is_recurrent
        feed_forward = 0 if is_short else widths.feed_forward()
        width = max(widths.mixer(), feed_forward)
        is_run = layer.kind is not LayerKind.NEXT_TOKEN
        peaks.append(width * ubatch * F32_BYTES if is_run else 0)
    return BufferSizes(
        layer_bytes=tuple(peaks),
        has_full_mask=tuple(
            layer.key_width > 0 and layer.window_tokens is None for layer in layers
        ),
        has_window_mask=tuple(layer.window_tokens is not None for layer in layers),
        is_recurrent=is_recurrent,
        full_mask_bytes=cells * ubatch * F16_BYTES,
        window_mask_bytes=window_cells * ubatch * F16_BYTES,
        hidden_bytes=shape.hidden_size * ubatch * F32_BYTES,
        logits_bytes=shape.vocabulary_size * options.parallel * F32_BYTES,
    )


class _Widths:
    """Elements a token that one layer's graph holds at its peaks."""

    def __init__(
        self, layer: LayerRecord, inventory: ModelInventory, tensors: Sequence[TensorRecord]
    ) -> None:
        self._layer = layer
        self._shape = inventory.shape
        self._shapes = {tensor.name.split(".", 2)[2]: tensor.shape for tensor in tensors}

    def mixer(self) -> int:
        """Attention or the recurrent part."""
        if convolution := self._rows("ssm_conv1d.weight"):
            return 4 * convolution
        if absorbed := self._shapes.get("attn_k_b.weight"):
            heads = absorbed[2] if len(absorbed) > 2 else self._shape.head_count
            latent = absorbed[1] * heads
            value = self._shapes.get("attn_v_b.weight", (0, 0))[1] * heads
            return self._rows("attn_q_b.weight") + 2 * latent + heads * 64 + value
        query = self._rows("attn_q.weight") or self._rows("attn_qkv.weight")
        return 2 * max(query, self._shape.hidden_size)

    def feed_forward(self) -> int:
        """The dense FFN or the experts, whichever the layer has."""
        hidden, shape = self._shape.hidden_size, self._shape
        if self._layer.expert_count:
            width = self._rows("ffn_up_exps.weight") or shape.expert_feed_forward_size
            used = shape.experts_per_token
            hole = 2 * used * width
            return 3 * used * width + (used * hidden if hole < used * hidden else 0)
        return 3 * (self._rows("ffn_up.weight") or shape.feed_forward_size)

    def _rows(self, name: str) -> int:
        shape = self._shapes.get(name, (0, 0))
        return shape[1] if len(shape) > 1 else 0
