"""What vLLM's workers do beside their own work: vLLM mixes this class into its own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class WorkerExtension:
    model_runner: Any

    def renew_shared_weights(self) -> None:
        """Pack anew what two layers share, such as the embedding that is also the head.

        On a CPU vLLM multiplies with packed copies of the weights. When weights are reloaded it renews the copy of the
        layer that was read, and would go on with the old one of the other layer.
        """
        layers: dict[int, list[Any]] = defaultdict(list)
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layers[layer.weight.data_ptr()].append(layer)
        for sharing in layers.values():
            for layer in sharing if len(sharing) > 1 else ():
                layer.quant_method.process_weights_after_loading(layer)
