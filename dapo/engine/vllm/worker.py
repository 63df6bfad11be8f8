"""An extension of vLLM's workers: vLLM adds this class to the bases of its worker class."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class WorkerExtension:
    model_runner: Any

    def renew_shared_weights(self) -> None:
        """Repack weights that two layers share, such as an embedding that is also the head.

        On a CPU vLLM multiplies with packed copies of the weights. A reload renews the copy of the layer whose name was
        in the file. The other layer would keep its old copy.
        """
        layers: dict[int, list[Any]] = defaultdict(list)
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layers[layer.weight.data_ptr()].append(layer)
        for sharing in layers.values():
            for layer in sharing if len(sharing) > 1 else ():
                layer.quant_method.process_weights_after_loading(layer)
