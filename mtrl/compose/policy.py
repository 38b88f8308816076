"""The model and the workers around it: encoder, policy, actor, reference, engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtrl.algorithms.credit import Rule
from mtrl.algorithms.estimators import Estimator
from mtrl.checkpoint.folder_store import write_folder
from mtrl.compose import algorithm
from mtrl.compose.compile_cache import keep_compiled
from mtrl.compose.hub import seek_model
from mtrl.config import Config, ConfigError
from mtrl.data.cache import default_cache_dir
from mtrl.data.templates import template_text
from mtrl.embedded.embedded_rows import MODELS
from mtrl.models.activation_checkpointing import recompute
from mtrl.models.adapters import add_adapters, base_path, has_adapters, is_adapter, quantize_base, reset_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, encoder_files, load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, load_model
from mtrl.models.parallel.fsdp import compute_device, is_split, whole
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.parallel.sequence import NO_SEQUENCE_PARALLEL, SequenceParallelGroup
from mtrl.models.state_dicts import load_weights, save_model, saved_weights
from mtrl.protocols import Generator, VideoSettings
from mtrl.rollout.decode.engine import fastest_generator, unknown_model
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.interrupt import say_at_once
from mtrl.training.resume import check_undamaged
from mtrl.workers.actor import LocalActor
from mtrl.workers.offload import OffloadedTensors
from mtrl.workers.reference import Reference

logger = logging.getLogger(__name__)

COMPILING = (
    "the first pass compiles kernels for this GPU, about a minute where they are not there yet; they are kept in "
    "{place}. Without: worker.actor.use_torch_compile=false, with slower passes"
)


@dataclass
class LoadedModel:
    """The model of a run with the encoder of its prompts: one object before the training, in it and after it."""

    encoder: TextEncoder
    policy: Forward
    is_pristine: bool = True  # whether its weights are those of model_path still

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.policy.backbone.model

    def load(self, directory: Path) -> None:
        """Takes over, in place, the weights of a checkpoint."""
        load_weights(self.model, directory)
        self.is_pristine = False

    def reset(self, config: Config) -> None:
        """The model as it was given: a run makes its reference of that before it goes on anywhere. One that failed in
        the middle of an update has left gradients behind."""
        self.model.eval().zero_grad()
        if not self.is_pristine:
            reload_initial_weights(config, self.model)
        self.is_pristine = True


def model_path(config: Config) -> str:
    """A directory or a hub id; an embedded model may be called by its name (a folder of that name: `./scenes`)."""
    name = config.worker.actor.model.model_path or "zoo"
    return str(MODELS.get(name, name))


def unmade(config: Config) -> str | None:
    """What to do where the model of an embedded task is called by its name and is not there."""
    name = config.worker.actor.model.model_path
    if name not in MODELS or (MODELS[name] / "config.json").is_file():
        return None
    return f"the files of the model {name} are missing; make it: python -m pretraining.pretrain {name}"


def build_encoder(config: Config) -> TextEncoder:
    settings, data = config.worker.actor.model, config.dataset
    if told := unmade(config):
        raise ValueError(told)
    seek_model(model_path(config))
    seek_model(settings.tokenizer_path or model_path(config))
    encoder = load_encoder(
        model_path(config),
        tokenizer_path=settings.tokenizer_path,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        video=VideoSettings(data.video_fps, data.video_max_frames, data.video_max_pixels),
        chat_template=data.override_chat_template,
        trust_remote_code=settings.trust_remote_code,
        allow_special_tokens=data.allow_special_tokens,
    )
    warn_of_written_tokens(
        encoder, {"system_prompt": data.system_prompt, "format_prompt": config_text(data.format_prompt)}
    )
    return encoder


def config_text(template: str | None) -> str | None:
    """The text of a template; one that cannot be read is told by whoever loads it."""
    with suppress(OSError, ValueError):
        return None if template is None else template_text(template)
    return None


def warn_of_written_tokens(encoder: TextEncoder, texts: Mapping[str, str | None]) -> None:
    """Whoever writes special tokens into a prompt of all rows may well mean them."""
    for key, text in texts.items():
        if found := encoder.tokens_as_text(text or ""):
            logger.warning("dataset.%s spells out %s, which is text for the model; dataset.allow_special_tokens=true "
                           "makes it a token", key, ", ".join(found))  # fmt: skip


def build_policy(config: Config, encoder: TextEncoder | None = None, base: Any = None) -> tuple[TextEncoder, Forward]:
    """`base`: the model of the configuration where it is in memory already, in `base_dtype`."""
    encoder = encoder or build_encoder(config)
    check_undamaged(Path(model_path(config)))
    return encoder, make_forward(config, encoder, load_policy(config, base))


def make_forward(
    config: Config,
    encoder: TextEncoder,
    model: Any,
    ranks: Ranks = SINGLE_PROCESS,
    sharers: SequenceParallelGroup = NO_SEQUENCE_PARALLEL,
) -> Forward:
    """The passes of a model that is there."""
    actor = config.worker.actor
    if actor.use_torch_compile and compute_device(model).type == "cuda":
        say_at_once(COMPILING.format(place=keep_compiled(default_cache_dir() / "compiled")))
    if actor.fsdp.mixed_precision_dtype == "bf16" and compute_device(model).type == "cpu":
        warn_of_slow_bf16()
    backbone = make_backbone(config, model, ranks)
    return Forward(
        backbone,
        encoder,
        config.worker.rollout.temperature,
        share_prefix=actor.share_prefix and shares_prefixes(backbone),
        packed=actor.padding_free and actor.use_torch_compile and backbone.packs,  # packing needs a compiled kernel
        last_k=config.optimization.attention_last_k_layers,
        weight_last_k=config.optimization.token_weight_last_k_layers,
        dependency=config.optimization.perception_estimator,
        top_p=config.worker.rollout.top_p,
        top_k=config.worker.rollout.top_k,
        sharers=sharers,
    )


def make_backbone(config: Config, model: Any, ranks: Ranks = SINGLE_PROCESS) -> Backbone:
    """A model that learns, actor or critic, in the settings of the configuration."""
    settings, actor = config.worker.actor.model, config.worker.actor
    compiled = actor.use_torch_compile and compute_device(model).type == "cuda"
    backbone = Backbone(model, DTYPES[actor.fsdp.mixed_precision_dtype], compiled=compiled, ranks=ranks)
    recompute(model, settings.enable_gradient_checkpointing)
    if settings.freeze_vision_tower and backbone.vision_tower is not None:
        backbone.vision_tower.requires_grad_(False)
    return backbone


def warn_of_slow_bf16() -> None:
    mkldnn = torch.backends.mkldnn
    if not mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning(
            "this processor computes in bf16 by way of float32, many times slower than in float32 itself; "
            "worker.actor.fsdp.mixed_precision_dtype=fp32 is quicker here"
        )


def load_policy(config: Config, base: Any = None, device: str | None = None) -> Any:
    """The model of a run. Adapters that are at its path already are taken over."""
    settings, path = algorithm.adapter_settings(config), model_path(config)
    options = load_options(config, device)
    if settings is None:
        return base or load_model(path, **options)
    quantized = config.worker.actor.model.peft_type == "qlora"
    if base is None:
        seek_model(base_path(path))
        kept = {"dtype": base_dtype(config)} | ({"device": "cpu"} if quantized else {})  # it goes there in 4 bits
        base = load_model(base_path(path), **options | kept)
    if quantized:
        quantize_base(base, torch.device(options["device"]))
    add_adapters(base, settings)
    if is_adapter(path):
        load_weights(base, Path(path))
    return base


def base_dtype(config: Config) -> str:
    """What the actor's model is loaded in. Under adapters it does not learn, and is kept as products take it: wider
    weights would be narrowed in every pass."""
    fsdp = config.worker.actor.fsdp
    return fsdp.param_dtype if config.worker.actor.model.peft_type is None else fsdp.mixed_precision_dtype


def reload_initial_weights(config: Config, model: Any) -> None:
    """The weights that a run is given, in place. Under adapters nothing has changed."""
    settings, path = algorithm.adapter_settings(config), Path(model_path(config))
    if settings is not None and not is_adapter(path):
        reset_adapters(model, settings.seed)
    else:
        load_weights(model, path)


def load_plain(config: Config, path: str) -> Any:
    """The model at a path in the settings of the configuration, as transformers has it."""
    return load_model(path, **load_options(config))


def load_options(config: Config, device: str | None = None) -> dict[str, Any]:
    settings = config.worker.actor.model
    return {
        "dtype": config.worker.actor.fsdp.param_dtype,
        "attn_implementation": settings.attn_implementation,
        "device": device or ("cuda" if torch.cuda.is_available() else "cpu"),
        "trust_remote_code": settings.trust_remote_code,
    }


def check_measurable(config: Config, rules: AlgorithmSpec, sees_attention: bool) -> None:
    """What somebody needs and nobody here measures is refused before the first step, with who asks for it."""
    wanted, looks = config.optimization.compute_attention_metrics, "attention_mass" in rules.needs
    if (looks or wanted is True or rules.maps_per_step) and not sees_attention:
        chosen = config.worker.actor.model.attn_implementation
        raise ConfigError([f"worker.actor.model.attn_implementation: {chosen} hides attention; set auto"])
    if looks and wanted is False:
        told = f"{asking(rules, 'attention_mass')} reads attention; set auto"
        raise ConfigError([f"optimization.compute_attention_metrics: false, but {told}"])
    if "values" in rules.needs and "values" not in rules.estimator.needs:
        told = f"{asking(rules, 'values')} asks for the signal values, which a critic measures, and there is none"
        raise ConfigError([f"optimization.credit: {told}; set optimization.advantage_estimator to gae"])


def asking(rules: AlgorithmSpec, name: str) -> str:
    """The rules and the estimator that read a signal, by name, for a message."""
    readers: list[Rule | Estimator] = [*rules.credit, rules.estimator]
    return ", ".join(type(each).__name__ for each in readers if name in each.needs) or "a reward or a logger"


def own_attention(config: Config) -> bool:
    """Whether a model in these settings attends by `models/masked_attention.py`."""
    return config.worker.actor.model.attn_implementation in ("auto", "sdpa")


def shares_prefixes(backbone: Backbone) -> bool:
    if not backbone.shares_prefixes:
        said = "share_prefix: not known to be exact for the family %r with %s attention; each response reads its prompt"
        logger.warning(said, backbone.model.config.model_type, backbone.attention_name)
    return backbone.shares_prefixes


def build_actor(
    config: Config, policy: Forward, encoder: TextEncoder, steps: int, reference: Reference | None = None
) -> LocalActor:
    on_gpu, images, ranks = policy.backbone.device.type == "cuda", encoder.image_settings, policy.backbone.ranks
    model = policy.backbone.model  # one that is split has a reference that lies where it was split to lie
    warn_of_large_steps("worker.actor.optim.lr", config.worker.actor.optim.lr, model)
    return LocalActor(
        policy,
        algorithm.optimizer_settings(config, steps),
        perturbation=algorithm.make_perturbation(config, images.patch_size if images else 1),
        update_batching=algorithm.update_batching(config, on_gpu, policy.share_prefix).over(ranks, policy.sharers.size),
        probe_batching=algorithm.probe_batching(config, on_gpu, policy.share_prefix).over(ranks, policy.sharers.size),
        encoder_files=encoder_files(encoder, model_path(config)),
        reference=reference,
        dropout_seed=algorithm.dropout_seed(config),
        offload_optimizer=on_gpu and algorithm.offloads_optimizer(config),
        offload_reference=on_gpu and config.worker.ref.offload_params and not (has_adapters(model) or is_split(model)),
    )


def warn_of_large_steps(key: str, lr: float, model: Any) -> None:
    """AdamW moves a weight by about the learning rate, whatever its gradient is: one as large as the weights leaves
    nothing of the model, and every number stays finite."""
    learning = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    squares = sum(float(whole(weight.norm(dtype=torch.float32))) ** 2 for weight in learning)
    size = math.sqrt(squares / max(1, sum(weight.numel() for weight in learning)))
    if lr > size > 0:
        logger.warning(
            "%s = %g is larger than the weights themselves (%.2g in root mean square): the first update leaves nothing "
            "of the model, since AdamW moves each weight by about lr; 1e-6 to 1e-5 are usual",
            key,
            lr,
            size,
        )


def build_reference(policy: Forward, rules: AlgorithmSpec) -> Reference | None:
    """The reference, where somebody reads it: a copy of the policy as it was given, before a checkpoint is restored, or
    what is under its adapters."""
    check_reference_to_sync(rules)
    if not rules.reads_reference:
        return None
    adapted = has_adapters(policy.backbone.model)
    return Reference.under_adapters(policy) if adapted else Reference.frozen(policy)


def check_reference_to_sync(rules: AlgorithmSpec) -> None:
    if rules.sync_ref_every and not rules.reads_reference:
        told = "there is no reference to refresh; set optimization.disable_divergence=false, or this to null"
        raise ConfigError([f"worker.ref.sync_every: {told}"])


def build_generator(config: Config, policy: Forward, encoder: TextEncoder, learns: bool = False) -> Generator:
    """The engine that samples; `learns`: it will be given new weights. This is the only place that chooses one."""
    if config.worker.rollout.name == "vllm":
        from mtrl.compose.vllm_engine import build_vllm  # it need not be installed

        engine = build_vllm(config, model_path(config), policy, encoder, learns)
        if config.worker.actor.offload.offload_params and policy.backbone.device.type == "cuda":
            weights = list(policy.backbone.model.parameters())
            engine.making_room = OffloadedTensors(lambda: weights, policy.backbone.device).away
        return engine
    if config.worker.rollout.name == "auto" and learns:
        say_at_once(chosen_engine(policy.backbone))
    return fastest_generator(policy.backbone, encoder)


def chosen_engine(backbone: Backbone) -> str:
    """What `auto` is, for people."""
    told = "worker.rollout.name=auto: the local engine samples"
    if why := unknown_model(backbone):
        return f"{told}, by its plain route also on a GPU ({why}); worker.rollout.name=vllm is the faster one there"
    return told


def save_checkpoint(config: Config, loaded: LoadedModel, target: Path) -> None:
    """Writes a checkpoint of the weights as they are now, with the tokenizer: Hugging Face's, or adapters of peft."""
    files = encoder_files(loaded.encoder, model_path(config))

    def write(folder: Path) -> None:
        save_model(loaded.model, saved_weights(loaded.model), folder)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    write_folder(target, write)
