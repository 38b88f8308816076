"""Builds encoder, policy, actor, reference and rollout engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtrl.algorithms.advantages import Estimator
from mtrl.algorithms.credit import Rule
from mtrl.algorithms.signals import ATTENTION
from mtrl.checkpoint.folder_store import write_folder
from mtrl.compose import algorithm
from mtrl.compose.family_checks import make_check_rollouts
from mtrl.config import Config, ConfigError
from mtrl.data.cache import default_cache_dir
from mtrl.data.hub import check_model_available
from mtrl.data.templates import read_template
from mtrl.models.activation_checkpointing import enable_activation_checkpointing
from mtrl.models.adapters import add_adapters, has_adapters, quantize_base, reset_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.checkpoint_files import base_path, is_adapter
from mtrl.models.compile_cache import set_compile_cache
from mtrl.models.families import (
    TextEncoder,
    UndescribedFamily,
    encoder_files,
    find_family,
    load_encoder,
    load_model_config,
    register_family,
)
from mtrl.models.families.undescribed import HOW_TO_ADD, ProcessorEncoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, load_model
from mtrl.models.model_object import prepare_model_object, write_model_object
from mtrl.models.parallel.fsdp import compute_device, full_tensor, is_sharded
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.plain_check import start_plain_check
from mtrl.models.state_dicts import checkpoint_weights, load_weights, save_model
from mtrl.models.views import ImageViews, View
from mtrl.protocols import VideoSettings
from mtrl.rollout.decode.engine import make_fastest_generator
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.resume import check_undamaged
from mtrl.types import OF_A_VIEW, VIEWS
from mtrl.utils.embedded_models import MODELS, NOT_INSTALLED, current_path, is_not_installed
from mtrl.utils.errors import StartError
from mtrl.utils.plugin_registry import Registry
from mtrl.utils.plugins import PluginError, load_user_object
from mtrl.utils.terminal import say_at_once
from mtrl.workers.actor import LocalActor
from mtrl.workers.offload import STAYING, OffloadedWeights, StayingWeights
from mtrl.workers.reference import Reference

logger = logging.getLogger(__name__)

OWN_ENGINES = Registry[EngineLifecycle]("rollout engine", (EngineLifecycle,), {}, frozen=False)

FORWARD_KEYS = (
    "temperature", "top_p", "top_k", "attention_last_k_layers", "token_weight_last_k_layers", "perception_estimator",
)  # fmt: skip
COMPILING = (
    "the first pass compiles kernels for this GPU, which takes about a minute unless they are cached in {directory}. "
    "worker.actor.use_torch_compile=false avoids it, with slower passes"
)


@dataclass(frozen=True)
class GivenModel:
    """A transformers model that a script passes, to be trained in place, and its processor or tokenizer, if given."""

    model: Any
    processing_class: Any = None


@dataclass
class LoadedModel:
    """The model of a run with its prompt encoder, before, during and after training."""

    encoder: TextEncoder
    policy: Forward
    is_pristine: bool = True  # the weights are still those of model_path

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.policy.backbone.model

    def load(self, directory: Path) -> None:
        """Load the weights of a checkpoint in place."""
        load_weights(self.model, directory)
        self.is_pristine = False

    def reset(self, config: Config) -> None:
        """Restore the initial weights, of which a run makes its reference before it resumes. Gradients may be left from
        a failed update."""
        self.model.eval().zero_grad()
        if not self.is_pristine:
            reload_initial_weights(config, self.model)
        self.is_pristine = True


def model_path(config: Config) -> str:
    """A directory or hub id, or the directory of an embedded model given by its name (`./scenes` is a folder)."""
    name = config.worker.actor.model.model_path or "zoo"
    return str(MODELS[name]) if name in MODELS else current_path(name)


def missing_model_hint(config: Config) -> str | None:
    """What to do if the model is an embedded one whose package is missing."""
    return NOT_INSTALLED if is_not_installed(model_path(config)) else None


def build_encoder(config: Config) -> TextEncoder:
    settings, data = config.worker.actor.model, config.dataset
    if hint := missing_model_hint(config):
        raise ValueError(hint)
    check_model_available(model_path(config))
    register_own_family(config)
    check_model_available(settings.tokenizer_path or model_path(config))
    encoder = load_encoder(
        model_path(config),
        tokenizer_path=settings.tokenizer_path,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        video=algorithm.from_keys(VideoSettings, data),
        chat_template=data.override_chat_template,
        trust_remote_code=settings.trust_remote_code,
        allow_special_tokens=data.allow_special_tokens,
    )
    if isinstance(encoder, ProcessorEncoder):
        check_undescribed(config)
    elif config.engine_name == "vllm":
        check_vllm_family(config)
    warn_about_special_tokens(config, encoder)
    return encoder


def check_undescribed(config: Config) -> None:
    """Refuse what a model whose prompts come from its own Processor does not have."""
    training = config.training
    wrong = {
        "training.n_gpus_per_node": training.nnodes * training.n_gpus_per_node > 1,
        "worker.actor.fsdp.cpu_offload": config.worker.actor.fsdp.cpu_offload,
        "worker.rollout.name": config.engine_name == "vllm",
        "training.record_attention_maps": training.record_attention_maps,
    }
    reason = "not available for prompts by the checkpoint's own Processor"
    if errors := [f"{key}: {reason}; {HOW_TO_ADD}" for key, is_set in wrong.items() if is_set]:
        raise ConfigError(errors)


def check_vllm_family(config: Config) -> None:
    model = load_model_config(model_path(config), config.worker.actor.model.trust_remote_code)
    if why := find_family(model).explain_no_vllm(model):
        reason = f"vLLM is not available for the family {model.model_type!r} ({why}); set it to local"
        raise ConfigError([f"worker.rollout.name: {reason}"])


def register_own_family(config: Config) -> None:
    """Register the user's family for models of the type of this one, in this process."""
    settings = config.worker.actor.model
    if settings.family is None:
        return
    try:
        family = load_user_object(settings.family, "model family")
        register_family(model_path(config), family, settings.trust_remote_code)
    except PluginError as error:
        raise ConfigError([f"worker.actor.model.family: {error}"]) from error


def warn_about_special_tokens(config: Config, encoder: TextEncoder) -> None:
    """Special tokens in a text for all prompts are probably meant as tokens."""
    texts, template = {"system_prompt": config.dataset.system_prompt or ""}, config.dataset.format_prompt
    with suppress(OSError, ValueError):  # reported when the template is loaded
        texts["format_prompt"] = "" if template is None else read_template(template)
    for key, text in texts.items():
        if tokens := encoder.find_written_tokens(text):
            logger.warning("dataset.%s contains %s, which the model reads as text; for a token set "
                           "dataset.allow_special_tokens=true", key, ", ".join(tokens))  # fmt: skip


def build_policy(config: Config, encoder: TextEncoder | None = None, base: Any = None) -> tuple[TextEncoder, Forward]:
    """`base`: the model of the configuration in `base_dtype`, if it is loaded already."""
    encoder = encoder or build_encoder(config)
    check_undamaged(Path(model_path(config)))
    model = load_policy(config, base)
    check = start_plain_check(model, encoder, make_check_rollouts)
    policy = make_forward(config, encoder, model)
    if check is not None:
        say_at_once(check.finish(policy))
    return encoder, policy


def adopt_model(config: Config, given: GivenModel, started: bool) -> LoadedModel:
    """Take over a script's model. Its weights at the start of a run are written to `model_path`, in the run directory:
    a reference and a resumed run need them after the object itself has learnt, or was made anew. So they are always
    loaded from there (`reset`)."""
    folder = Path(model_path(config))
    if not started:
        write_folder(folder, lambda part: write_model_object(given.model, given.processing_class, part))
    elif not folder.is_dir():
        raise StartError(
            f"{folder} is missing, the weights that this run started with; put it back, or start a new run"
        )
    options = load_options(config)
    prepare_model_object(
        given.model,
        dtype=options["dtype"],
        device=options["device"],
        attn_implementation=options["attn_implementation"],
    )
    return LoadedModel(*build_policy(config, base=given.model), is_pristine=False)


def make_forward(config: Config, encoder: TextEncoder, model: Any, ranks: Ranks = SINGLE_PROCESS) -> Forward:
    """The forward passes of a loaded model."""
    actor = config.worker.actor
    if actor.use_torch_compile and compute_device(model).type == "cuda":
        say_at_once(COMPILING.format(directory=set_compile_cache(default_cache_dir() / "compiled")))
    if actor.fsdp.mixed_precision_dtype == "bf16" and compute_device(model).type == "cpu":
        warn_about_slow_bf16()
    backbone = make_backbone(config, model, ranks)
    return Forward(
        backbone,
        encoder,
        share_prefix=actor.share_prefix and can_share_prefixes(backbone),
        packed=actor.padding_free and actor.use_torch_compile and backbone.can_pack,  # packing needs a compiled kernel
        **algorithm.read_keys(config.worker.rollout, config.optimization, only=FORWARD_KEYS),
    )


def make_backbone(config: Config, model: Any, ranks: Ranks = SINGLE_PROCESS) -> Backbone:
    """The backbone of a trained model, actor or critic."""
    settings, actor = config.worker.actor.model, config.worker.actor
    compiled = actor.use_torch_compile and compute_device(model).type == "cuda"
    backbone = Backbone(model, DTYPES[actor.fsdp.mixed_precision_dtype], compiled=compiled, ranks=ranks)
    enable_activation_checkpointing(model, settings.enable_gradient_checkpointing)
    if settings.freeze_vision_tower and backbone.vision_tower is not None:
        backbone.vision_tower.requires_grad_(False)
    backbone.family.freeze_unused_parts(model)
    return backbone


def warn_about_slow_bf16() -> None:
    mkldnn = torch.backends.mkldnn
    if not mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning(
            "this processor emulates bf16, which is many times slower than float32; "
            "set worker.actor.fsdp.mixed_precision_dtype=fp32"
        )


def load_policy(config: Config, base: Any = None, device: str | None = None) -> Any:
    """Load the model of a run, with the adapters at its path, if any."""
    register_own_family(config)
    settings, path = algorithm.make_adapter_settings(config), model_path(config)
    options = load_options(config, device)
    if settings is None:
        return base or load_model(path, **options)
    quantized = config.worker.actor.model.peft_type == "qlora"
    if base is None:
        check_model_available(base_path(path))
        device_options = {"device": "cpu"} if quantized else {}  # it is moved after quantization
        base = load_model(base_path(path), **options | {"dtype": base_dtype(config)} | device_options)
    if quantized:
        quantize_base(base, torch.device(load_options(config)["device"]), torch.device(options["device"]))
    add_adapters(base, settings)
    if is_adapter(path):
        load_weights(base, Path(path))
    return base


def base_dtype(config: Config) -> str:
    """The dtype in which the actor's model is loaded. A base under adapters is not trained: it is stored in the dtype
    of the computation, so that it is not cast in every pass."""
    fsdp = config.worker.actor.fsdp
    return fsdp.param_dtype if config.worker.actor.model.peft_type is None else fsdp.mixed_precision_dtype


def reload_initial_weights(config: Config, model: Any) -> None:
    """Load the initial weights of a run in place. The base under adapters never changes."""
    settings, path = algorithm.make_adapter_settings(config), Path(model_path(config))
    if settings is not None and not is_adapter(path):
        reset_adapters(model, settings.seed)
    else:
        load_weights(model, path)


def load_options(config: Config, device: str | None = None) -> dict[str, Any]:
    settings = config.worker.actor.model
    return {
        "dtype": config.worker.actor.fsdp.param_dtype,
        "attn_implementation": settings.attn_implementation,
        "device": device or ("cuda" if torch.cuda.is_available() else "cpu"),
        "trust_remote_code": settings.trust_remote_code,
    }


def check_signals_available(config: Config, spec: AlgorithmSpec, can_read_attention: bool) -> None:
    """Raise before the first step if a signal is needed that cannot be measured."""
    live = spec.loss.live_needs
    for name in (*spec.needs.other_views, *live.other_views):
        try:
            View.parse(name)
        except ValueError as error:
            raise ConfigError([f"optimization.credit, signals, loss_terms: {error}"]) from error
    if wrong := sorted(live.names - {f"{each}@{view}" for view in live.other_views for each in OF_A_VIEW}):
        raise ConfigError([
            f"optimization.loss_terms: {wrong[0]} cannot be computed in an update; there are {', '.join(OF_A_VIEW)}, "
            "each @ a view"
        ])  # fmt: skip
    if not can_read_attention and (changing := spec.needs.unshared_views + live.unshared_views):
        chosen = config.worker.actor.model.attn_implementation
        message = f"{chosen} lets nobody change attention, as the view {changing[0]} does; set auto"
        raise ConfigError([f"worker.actor.model.attn_implementation: {message}"])
    if unknown := spec.needs.unknown:
        reader, known = _name_readers(spec, unknown[0]), ", ".join(VIEWS)
        message = f"{reader} needs the signal {unknown[0]}, which nothing measures; there are {known}"
        raise ConfigError([f"optimization.signals: {message}; name the file of your own here: file.py:Name"])
    setting, needed = config.optimization.compute_attention_metrics, [name for name in ATTENTION if name in spec.needs]
    if (needed or setting is True or spec.maps_per_step) and not can_read_attention:
        chosen = config.worker.actor.model.attn_implementation
        raise ConfigError([f"worker.actor.model.attn_implementation: {chosen} does not expose attention; set auto"])
    if needed and setting is False:
        reader = _name_readers(spec, needed[0])
        raise ConfigError([f"optimization.compute_attention_metrics: false, but {reader} reads attention; set auto"])
    if "values" in spec.needs and "values" not in spec.estimator.needs:
        reader = f"{_name_readers(spec, 'values')} needs the signal values, and there is no critic to measure it"
        raise ConfigError([f"optimization.credit: {reader}; set optimization.advantage_estimator to gae"])


def _name_readers(spec: AlgorithmSpec, name: str) -> str:
    readers: list[Rule | Estimator] = [*spec.credit, spec.estimator]
    return ", ".join(type(each).__name__ for each in readers if name in each.needs) or "a reward or a logger"


def uses_own_attention(config: Config) -> bool:
    """Whether the model uses the attention of `models/masked_attention.py`."""
    return config.worker.actor.model.attn_implementation in ("auto", "sdpa")


def can_share_prefixes(backbone: Backbone) -> bool:
    if not backbone.can_share_prefix and not isinstance(backbone.family, UndescribedFamily):  # said by its check
        logger.warning(
            "worker.actor.share_prefix: not known to be exact for the family %r with %s attention; each response "
            "computes its prompt", backbone.model.config.model_type, backbone.attention_name,
        )  # fmt: skip
    return backbone.can_share_prefix


def build_actor(
    config: Config,
    policy: Forward,
    encoder: TextEncoder,
    steps: int,
    reference: Reference | None = None,
    weights: StayingWeights = STAYING,
) -> LocalActor:
    on_gpu, images, ranks = policy.backbone.device.type == "cuda", encoder.image_settings, policy.backbone.ranks
    model = policy.backbone.model
    has_own_reference = not (has_adapters(model) or is_sharded(model))  # a sharded one is placed when it is sharded
    warn_about_large_lr("worker.actor.optim.lr", config.worker.actor.optim.lr, model)
    live = algorithm.make_live_needs(config)
    return LocalActor(
        policy,
        algorithm.make_optimizer_settings(config, steps),
        views=ImageViews(algorithm.make_perturbation(config, images.patch_size if images else 1), images),
        update_batching=algorithm.make_update_batching(config, on_gpu, policy.share_prefix, live).over(ranks),
        probe_batching=algorithm.make_probe_batching(config, on_gpu, policy.share_prefix).over(ranks),
        encoder_files=encoder_files(encoder, model_path(config)),
        reference=reference,
        dropout_seed=algorithm.dropout_seed(config),
        offload_optimizer=on_gpu and algorithm.offloads_optimizer(config),
        offload_reference=on_gpu and config.worker.ref.offload_params and has_own_reference,
        weights=weights,
    )


def build_weights(config: Config, policy: Forward) -> StayingWeights:
    """The policy's weights, which make room for other models if they are offloaded. On a CPU that would only copy."""
    on_gpu = policy.backbone.device.type == "cuda"
    return OffloadedWeights(policy.backbone.model) if on_gpu and algorithm.offloads_params(config) else STAYING


def warn_about_large_lr(key: str, lr: float, model: Any) -> None:
    """AdamW moves a weight by about the learning rate, whatever its gradient. A rate as large as the weights destroys
    the model, though all numbers stay finite."""
    trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    squares = sum(float(full_tensor(weight.norm(dtype=torch.float32))) ** 2 for weight in trained)
    size = math.sqrt(squares / max(1, sum(weight.numel() for weight in trained)))
    if lr > size > 0:
        logger.warning(
            "%s = %g is larger than the weights themselves (root mean square %.2g): the first update destroys the "
            "model, since AdamW moves each weight by about lr; 1e-6 to 1e-5 is usual", key, lr, size,
        )  # fmt: skip


def build_reference(policy: Forward, spec: AlgorithmSpec) -> Reference | None:
    """The reference, if it is read: a copy of the initial policy, before a checkpoint is restored, or the base model
    under its adapters."""
    check_reference_to_sync(spec)
    if not spec.reads_reference:
        return None
    return Reference.under_adapters(policy) if has_adapters(policy.backbone.model) else Reference.frozen(policy)


def check_reference_to_sync(spec: AlgorithmSpec) -> None:
    if spec.sync_ref_every and not spec.reads_reference:
        hint = "set optimization.disable_divergence to false, or sync_every to null"
        raise ConfigError([f"worker.ref.sync_every: there is no reference to sync; {hint}"])


def build_generator(
    config: Config,
    policy: Forward,
    encoder: TextEncoder,
    gets_weights: bool = False,
    weights: StayingWeights = STAYING,
) -> EngineLifecycle:
    """Choose and build the rollout engine; `gets_weights`: it will be given new weights. The policy's `weights` are on
    the device while an engine samples from them, and make room for one that has its own."""
    engine = _choose_generator(config, policy, encoder, gets_weights)
    if weights is not STAYING:
        engine.before_wake = weights.offload if config.engine_name == "vllm" else weights.onload
    return engine


def _choose_generator(config: Config, policy: Forward, encoder: TextEncoder, gets_weights: bool) -> EngineLifecycle:
    if ":" in config.engine_name:
        return build_own_engine(config, encoder, lambda: policy)[0]
    if config.engine_name == "vllm":
        from mtrl.compose.vllm_engine import build_vllm  # vLLM may not be installed

        return build_vllm(config, model_path(config), policy, encoder, gets_weights)
    if config.engine_name == "auto" and gets_weights:
        backbone = policy.backbone
        why = explain_unsupported(backbone.language_model, backbone.model.get_output_embeddings())
        slow = f", without its fast path on a GPU ({why})" if why else ""
        has_vllm = backbone.family.runs_in_vllm
        other = "; worker.rollout.name=vllm is faster there" if why and has_vllm else ""
        say_at_once(f"worker.rollout.name=auto: the local engine samples{slow}{other}")
    return make_fastest_generator(policy.backbone, encoder)


def build_own_engine(
    config: Config, encoder: TextEncoder, make_policy: Callable[[], Forward]
) -> tuple[EngineLifecycle, Backbone | None]:
    """The engine of a user's file, and the model that it was given, if it has a field for the policy."""
    spec, offered = config.worker.rollout.name, dict[str, Any](encoder=encoder, model_path=model_path(config))
    backbone: Backbone | None = None
    try:
        if OWN_ENGINES.takes(spec, "policy"):
            offered["policy"] = policy = make_policy()
            backbone = policy.backbone
        return OWN_ENGINES.make(spec, offered), backbone
    except PluginError as error:
        raise ConfigError([f"worker.rollout.name: {error}"]) from error


def save_checkpoint(config: Config, loaded: LoadedModel, target: Path) -> None:
    """Write the current weights, or peft adapters, and the tokenizer as a Hugging Face checkpoint."""
    files = encoder_files(loaded.encoder, model_path(config))

    def write(folder: Path) -> None:
        save_model(loaded.model, checkpoint_weights(loaded.model), folder)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    write_folder(target, write)
