"""Architectures that people train, tiny, with random weights and no dropout: of Hugging Face's
`transformers` and `diffusers`, of `timm`, and a DiT of our own.

`ARCHITECTURES` is the registry, a line each. `architecture` builds one, `architecture_loss` is its
loss on data of its own for each rank and step. Those of `diffusers` and `timm` need these to be
installed, and the tests don't.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.dit import dit_loss
from torch import Tensor, nn

IN_CI = ("llama", "bert", "gpt2", "vit", "t5", "mixtral", "dit")
"""Those that the tests train."""

EXPERTS = ("grouped_mm", "batched_mm", "eager")
"""How `transformers` computes a mixture of experts; the last loops over those that are hit."""

VOCAB, LENGTH, BATCH = 97, 12, 2

Random = torch.Generator
Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A line of the registry.

    model:  the name of a class in `library`, or of a function that builds the model.
    batch:  the arguments of forward, drawn with a generator of the rank's and the step's. None is
            our DiT's own, which is to find noise in images.
    config: that of the model, or what its constructor takes where the library is `diffusers` or
            `timm`.
    ordered: whether all ranks run the same parts in the same order, whatever their data.
    """

    family: str
    model: str
    batch: Callable[[Random], Values] | None
    config: Values
    library: str = "transformers"
    ordered: bool = True


# Batches.


def ids(random: Random, *, length: int = LENGTH, rows: int = BATCH) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=random)


def normal(random: Random, *shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=random)


def labels(random: Random, classes: int = 5) -> Tensor:
    return torch.randint(0, classes, (BATCH,), generator=random)


def text(random: Random) -> Values:
    """Of a decoder, and of an encoder that is to say its input."""
    drawn = ids(random)
    return {"input_ids": drawn, "labels": drawn}


def pair(random: Random) -> Values:
    return {"input_ids": ids(random), "labels": ids(random, length=7)}


def image(random: Random) -> Values:
    return {"pixel_values": normal(random, 3, 32, 32)}


def labelled(random: Random) -> Values:
    return {**image(random), "labels": labels(random)}


def masked_image(random: Random) -> Values:
    return {**image(random), "noise": torch.rand(BATCH, 64, generator=random)}


def photo(random: Random) -> Values:
    return {"x": normal(random, 3, 32, 32)}


def pixels(random: Random) -> Values:
    drawn = torch.randint(0, 5, (BATCH, 32, 32), generator=random)
    return {**image(random), "labels": drawn}


def wave(random: Random) -> Values:
    return {"input_values": normal(random, 800)}


def spoken(random: Random) -> Values:
    return {**wave(random), "labels": ids(random, length=3)}


def spectrogram(random: Random) -> Values:
    return {"input_features": normal(random, 16, 40), "labels": ids(random, length=7)}


def patches_of_sound(random: Random) -> Values:
    return {"input_values": normal(random, 40, 16), "labels": labels(random)}


def features_of_sound(random: Random) -> Values:
    return {"input_features": normal(random, 40, 16), "labels": ids(random, length=7)}


def captioned(random: Random) -> Values:
    return {**image(random), "input_ids": ids(random)}


def told(random: Random) -> Values:
    drawn = captioned(random)
    return {**drawn, "labels": drawn["input_ids"]}


def matched(random: Random) -> Values:
    return {**captioned(random), "return_loss": True}


def about_image(random: Random) -> Values:
    """Text in which 16 tokens stand for the image's patches."""
    drawn = ids(random, length=LENGTH + 16)
    drawn[:, 2:18] = 1
    return {**image(random), "input_ids": drawn, "labels": drawn}


def series(random: Random) -> Values:
    """24 values to predict 4 of; 3 more for the lags."""
    return {
        "past_values": normal(random, 27),
        "past_time_features": normal(random, 27, 2),
        "past_observed_mask": torch.ones(BATCH, 27),
        "future_values": normal(random, 4),
        "future_time_features": normal(random, 4, 2),
    }


def channels(random: Random) -> Values:
    return {"past_values": normal(random, 24, 3), "future_values": normal(random, 4, 3)}


def episodes(random: Random) -> Values:
    return {
        "states": normal(random, 6, 5),
        "actions": normal(random, 6, 3),
        "rewards": normal(random, 6, 1),
        "returns_to_go": normal(random, 6, 1),
        "timesteps": torch.randint(0, 20, (BATCH, 6), generator=random),
        "attention_mask": torch.ones(BATCH, 6),
    }


def noisy(random: Random) -> Values:
    times = torch.randint(0, 1000, (BATCH,), generator=random)
    return {"sample": normal(random, 3, 16, 16), "timestep": times}


def noisy_wave(random: Random) -> Values:
    times = torch.randint(0, 1000, (BATCH,), generator=random)
    return {"sample": normal(random, 2, 32), "timestep": times}


def latent(random: Random) -> Values:
    return {"sample": normal(random, 3, 16, 16)}


def prompted(random: Random) -> Values:
    return {**noisy(random), "encoder_hidden_states": normal(random, 7, 16)}


def classed(random: Random) -> Values:
    values = noisy(random)
    return {
        "hidden_states": values["sample"],
        "timestep": values["timestep"],
        "class_labels": labels(random),
    }


def patches_prompted(random: Random) -> Values:
    values = noisy(random)
    return {
        "hidden_states": values["sample"],
        "timestep": values["timestep"],
        "encoder_hidden_states": normal(random, 7, 16),
    }


def pixart(random: Random) -> Values:
    none = {"resolution": None, "aspect_ratio": None}
    return {**patches_prompted(random), "added_cond_kwargs": none}


def pooled(random: Random) -> Values:
    return {**patches_prompted(random), "pooled_projections": normal(random, 16)}


def flux(random: Random) -> Values:
    return {
        "hidden_states": normal(random, 16, 4),
        "encoder_hidden_states": normal(random, 7, 16),
        "pooled_projections": normal(random, 16),
        "timestep": torch.rand(BATCH, generator=random),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
        "guidance": torch.ones(BATCH),
    }


def frames(random: Random) -> Values:
    values = patches_prompted(random)
    return {**values, "hidden_states": normal(random, 3, 4, 8, 8)}


# Configurations. An option that a model's does not have is one more attribute of it.

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
CODER = {  # encoder and decoder
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 56,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
EXPERT = {
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "grouped_mm",
}
CLASSES = {
    "num_labels": 5,
    "problem_type": "single_label_classification",  # else the first forward writes it
}
PATCHES = {**SMALL, **CLASSES, "image_size": 32, "patch_size": 8}
STAGES = {**CLASSES, "depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2}
WAVE = {
    **SMALL,
    "conv_dim": (8, 8),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "ctc_zero_infinity": True,
}
VISION = {k: v for k, v in PATCHES.items() if k not in CLASSES}
TWO_TOWERS = {"text_config": SMALL, "vision_config": VISION, "projection_dim": 16}
FORECAST = {
    "prediction_length": 4,
    "context_length": 24,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
CHANNELS = {
    "num_input_channels": 3,
    "context_length": 24,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 24,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}
DETECTOR = {
    **CODER,
    **CLASSES,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": RESNET,
    "num_queries": 4,
}
UNET = {
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}
BLOCKS = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 3,
    "num_layers": 2,
    "sample_size": 16,
    "patch_size": 4,
}


def _diffusers(model: str, batch: Callable[[Random], Values], config: Values) -> Architecture:
    return Architecture("diffusion", model, batch, config, "diffusers")


def _timm(model: str, **config: Any) -> Architecture:
    return Architecture("timm", model, photo, {"num_classes": 5, **config}, "timm.models")


A = Architecture
ARCHITECTURES = {
    # Decoders of text.
    "llama": A("decoder", "LlamaForCausalLM", text, GROUPED),
    "mistral": A("decoder", "MistralForCausalLM", text, {**GROUPED, "sliding_window": 8}),
    "qwen2": A("decoder", "Qwen2ForCausalLM", text, GROUPED),
    "qwen3": A("decoder", "Qwen3ForCausalLM", text, GROUPED),
    "gemma": A("decoder", "GemmaForCausalLM", text, GROUPED),
    "gemma2": A("decoder", "Gemma2ForCausalLM", text, {**GROUPED, "sliding_window": 8}),
    "gemma3": A("decoder", "Gemma3ForCausalLM", text, {**GROUPED, "sliding_window": 8}),
    "phi": A("decoder", "PhiForCausalLM", text, SMALL),
    "phi3": A("decoder", "Phi3ForCausalLM", text, GROUPED),
    "gpt2": A("decoder", "GPT2LMHeadModel", text, {**SMALL, "loss_type": "ForCausalLMLoss"}),
    "gpt_neo": A("decoder", "GPTNeoForCausalLM", text, {
        **SMALL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": 8}),
    "gpt_neox": A("decoder", "GPTNeoXForCausalLM", text, SMALL),
    "gptj": A("decoder", "GPTJForCausalLM", text, {**SMALL, "rotary_dim": 4}),
    "opt": A("decoder", "OPTForCausalLM", text, {
        **SMALL, "ffn_dim": 56, "word_embed_proj_dim": 32}),
    "bloom": A("decoder", "BloomForCausalLM", text, SMALL),
    "falcon": A("decoder", "FalconForCausalLM", text, SMALL),
    "mpt": A("decoder", "MptForCausalLM", text, {
        "vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "stablelm": A("decoder", "StableLmForCausalLM", text, GROUPED),
    "starcoder2": A("decoder", "Starcoder2ForCausalLM", text, GROUPED),
    "olmo2": A("decoder", "Olmo2ForCausalLM", text, GROUPED),
    "cohere": A("decoder", "CohereForCausalLM", text, GROUPED),
    "granite": A("decoder", "GraniteForCausalLM", text, GROUPED),
    "smollm3": A("decoder", "SmolLM3ForCausalLM", text, GROUPED),
    "codegen": A("decoder", "CodeGenForCausalLM", text, {**SMALL, "rotary_dim": 4}),
    "glm4": A("decoder", "Glm4ForCausalLM", text, GROUPED),
    # Encoders of text.
    "bert": A("encoder", "BertForMaskedLM", text, SMALL),
    "roberta": A("encoder", "RobertaForMaskedLM", text, SMALL),
    "albert": A("encoder", "AlbertForMaskedLM", text, {**SMALL, "embedding_size": 16}),
    "deberta_v2": A("encoder", "DebertaV2ForMaskedLM", text, {
        **SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False}),
    "electra": A("encoder", "ElectraForMaskedLM", text, {**SMALL, "embedding_size": 16}),
    "distilbert": A("encoder", "DistilBertForMaskedLM", text, {
        **SMALL, "dim": 32, "hidden_dim": 56, "n_layers": 2, "n_heads": 4}),
    "modernbert": A("encoder", "ModernBertForMaskedLM", text, {
        **SMALL, "local_attention": 8, "global_attn_every_n_layers": 2}),
    "mpnet": A("encoder", "MPNetForMaskedLM", text, SMALL),
    "xlnet": A("encoder", "XLNetLMHeadModel", text, {
        "vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 56}),
    "fnet": A("encoder", "FNetForMaskedLM", text, SMALL),
    "longformer": A("encoder", "LongformerForMaskedLM", text, {**SMALL, "attention_window": 4}),
    "convbert": A("encoder", "ConvBertForMaskedLM", text, {**SMALL, "embedding_size": 16}),
    "esm": A("encoder", "EsmForMaskedLM", text, {
        **SMALL, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    # From text to text.
    "t5": A("encoder-decoder", "T5ForConditionalGeneration", pair, T5),
    "longt5": A("encoder-decoder", "LongT5ForConditionalGeneration", pair, {
        **T5, "local_radius": 4, "global_block_size": 4}),
    "bart": A("encoder-decoder", "BartForConditionalGeneration", pair, CODER),
    "mbart": A("encoder-decoder", "MBartForConditionalGeneration", pair, CODER),
    "pegasus": A("encoder-decoder", "PegasusForConditionalGeneration", pair, CODER),
    "marian": A("encoder-decoder", "MarianMTModel", pair, CODER),
    "blenderbot": A("encoder-decoder", "BlenderbotForConditionalGeneration", pair, CODER),
    "m2m_100": A("encoder-decoder", "M2M100ForConditionalGeneration", pair, CODER),
    "prophetnet": A("encoder-decoder", "ProphetNetForConditionalGeneration", pair, {
        "vocab_size": VOCAB, "hidden_size": 32, "max_position_embeddings": 64,
        "num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 56,
        "decoder_ffn_dim": 56, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
        "pad_token_id": 0, "decoder_start_token_id": 2}),
    # Mixtures of experts.
    "mixtral": A("experts", "MixtralForCausalLM", text, {**GROUPED, **EXPERT}),
    "qwen2_moe": A("experts", "Qwen2MoeForCausalLM", text, {
        **GROUPED, **EXPERT, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": A("experts", "Qwen3MoeForCausalLM", text, {**GROUPED, **EXPERT}),
    "olmoe": A("experts", "OlmoeForCausalLM", text, {**GROUPED, **EXPERT}),
    "granitemoe": A("experts", "GraniteMoeForCausalLM", text, {**GROUPED, **EXPERT}),
    "deepseek_v3": A("experts", "DeepseekV3ForCausalLM", text, {
        **SMALL, **EXPERT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1}),
    "gpt_oss": A("experts", "GptOssForCausalLM", text, {**GROUPED, **EXPERT, "sliding_window": 8}),
    "switch_transformers": A("experts", "SwitchTransformersForConditionalGeneration", pair, {
        **T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        ordered=False),
    # Recurrences, alone and between attentions.
    "mamba": A("recurrent", "MambaForCausalLM", text, {**SMALL, "state_size": 4}),
    "falcon_mamba": A("recurrent", "FalconMambaForCausalLM", text, {**SMALL, "state_size": 4}),
    "mamba2": A("recurrent", "Mamba2ForCausalLM", text, {
        **SMALL, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    "rwkv": A("recurrent", "RwkvForCausalLM", text, {**SMALL, "context_length": 64}),
    "recurrent_gemma": A("recurrent", "RecurrentGemmaForCausalLM", text, {
        **GROUPED, "lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3}),
    "jamba": A("recurrent", "JambaForCausalLM", text, {
        **GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 2,
        "use_mamba_kernels": False}),
    "bamba": A("recurrent", "BambaForCausalLM", text, {
        **GROUPED, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}),
    "qwen3_next": A("recurrent", "Qwen3NextForCausalLM", text, {
        **GROUPED, **EXPERT, "shared_expert_intermediate_size": 24, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"]}),
    # Vision.
    "vit": A("vision", "ViTForImageClassification", labelled, PATCHES),
    "deit": A("vision", "DeiTForImageClassification", labelled, PATCHES),
    "beit": A("vision", "BeitForImageClassification", labelled, PATCHES),
    "dinov2": A("vision", "Dinov2ForImageClassification", labelled, PATCHES),
    "vit_mae": A("vision", "ViTMAEForPreTraining", masked_image, {
        **PATCHES, "patch_size": 4, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 24}),
    "swin": A("vision", "SwinForImageClassification", labelled, {
        **CLASSES, "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2],
        "num_heads": [2, 2], "window_size": 4}),
    "swinv2": A("vision", "Swinv2ForImageClassification", labelled, {
        **CLASSES, "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2],
        "num_heads": [2, 2], "window_size": 4}),
    "convnext": A("vision", "ConvNextForImageClassification", labelled, STAGES),
    "convnextv2": A("vision", "ConvNextV2ForImageClassification", labelled, STAGES),
    "resnet": A("vision", "ResNetForImageClassification", labelled, {
        **STAGES, "embedding_size": 8, "layer_type": "basic"}),
    "regnet": A("vision", "RegNetForImageClassification", labelled, {
        **STAGES, "embedding_size": 8, "groups_width": 4}),
    "mobilenet_v2": A("vision", "MobileNetV2ForImageClassification", labelled, {
        **CLASSES, "depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4}),
    "poolformer": A("vision", "PoolFormerForImageClassification", labelled, {
        **CLASSES, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}),
    "pvt": A("vision", "PvtForImageClassification", labelled, {
        **CLASSES, "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1],
        "sequence_reduction_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [4, 2],
        "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}),
    "segformer": A("vision", "SegformerForSemanticSegmentation", pixels, {
        **CLASSES, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
        "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
        "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}),
    "detr": A("vision", "DetrForObjectDetection", image, DETECTOR),
    "conditional_detr": A("vision", "ConditionalDetrForObjectDetection", image, DETECTOR),
    "yolos": A("vision", "YolosForObjectDetection", image, {
        **PATCHES, "image_size": [32, 32], "num_detection_tokens": 4}),
    # Sound.
    "wav2vec2": A("audio", "Wav2Vec2ForCTC", spoken, WAVE),
    "hubert": A("audio", "HubertForCTC", spoken, WAVE),
    "wavlm": A("audio", "WavLMForCTC", spoken, WAVE),
    "unispeech": A("audio", "UniSpeechForCTC", spoken, WAVE),
    "data2vec_audio": A("audio", "Data2VecAudioForCTC", spoken, {
        **WAVE, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}),
    "whisper": A("audio", "WhisperForConditionalGeneration", spectrogram, {
        **CODER, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16}),
    "speech_to_text": A("audio", "Speech2TextForConditionalGeneration", features_of_sound, {
        **CODER, "input_feat_per_channel": 16, "conv_channels": 16, "max_source_positions": 64,
        "max_target_positions": 16}),
    "ast": A("audio", "ASTForAudioClassification", patches_of_sound, {
        **SMALL, **CLASSES, "patch_size": 8, "frequency_stride": 4, "time_stride": 4,
        "max_length": 40, "num_mel_bins": 16}),
    # Text and images.
    "clip": A("multimodal", "CLIPModel", matched, TWO_TOWERS),
    "siglip": A("multimodal", "SiglipModel", matched, TWO_TOWERS),
    "chinese_clip": A("multimodal", "ChineseCLIPModel", matched, TWO_TOWERS),
    "blip": A("multimodal", "BlipForConditionalGeneration", told, TWO_TOWERS),
    "git": A("multimodal", "GitForCausalLM", told, {**SMALL, "vision_config": VISION}),
    "vilt": A("multimodal", "ViltModel", captioned, {**PATCHES, "max_image_length": -1}),
    "llava": A("multimodal", "LlavaForConditionalGeneration", about_image, {
        "text_config": {**GROUPED, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_id": 1, "image_seq_length": 16}),
    "paligemma": A("multimodal", "PaliGemmaForConditionalGeneration", about_image, {
        "text_config": {**GROUPED, "model_type": "gemma"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_id": 1, "projection_dim": 32, "hidden_size": 32}),
    # Diffusion.
    "dit": A("diffusion", "DiT", None, {}, "support.dit"),
    "unet_2d": _diffusers("UNet2DModel", noisy, {
        **UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8}),
    "unet_2d_condition": _diffusers("UNet2DConditionModel", prompted, {
        **UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 16,
        "attention_head_dim": 4}),
    "unet_1d": _diffusers("UNet1DModel", noisy_wave, {
        "sample_size": 32, "in_channels": 2, "out_channels": 2, "extra_in_channels": 64,
        "block_out_channels": (32, 32), "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
        "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip")}),
    "autoencoder_kl": _diffusers("AutoencoderKL", latent, {
        **UNET, "latent_channels": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2}),
    "dit_transformer": _diffusers("DiTTransformer2DModel", classed, {
        **BLOCKS, "out_channels": 3, "num_embeds_ada_norm": 1000, "norm_num_groups": 4}),
    "pixart": _diffusers("PixArtTransformer2DModel", pixart, {
        **BLOCKS, "out_channels": 3, "cross_attention_dim": 16, "caption_channels": 16,
        "norm_num_groups": 4, "use_additional_conditions": False}),
    "sd3": _diffusers("SD3Transformer2DModel", pooled, {
        **BLOCKS, "out_channels": 3, "joint_attention_dim": 16, "caption_projection_dim": 16,
        "pooled_projection_dim": 16, "pos_embed_max_size": 8}),
    "flux": _diffusers("FluxTransformer2DModel", flux, {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
        "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16,
        "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4), "guidance_embeds": True}),
    "cogvideox": _diffusers("CogVideoXTransformer3DModel", frames, {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
        "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 2, "sample_width": 8,
        "sample_height": 8, "sample_frames": 9, "patch_size": 2, "max_text_seq_length": 7}),
    # Series, and episodes.
    "time_series_transformer": A("series", "TimeSeriesTransformerForPrediction", series, FORECAST),
    "informer": A("series", "InformerForPrediction", series, FORECAST),
    "autoformer": A("series", "AutoformerForPrediction", series, {
        **FORECAST, "label_length": 4, "moving_average": 5}),
    "patchtst": A("series", "PatchTSTForPrediction", channels, CHANNELS),
    "patchtsmixer": A("series", "PatchTSMixerForPrediction", channels, CHANNELS),
    "decision_transformer": A("series", "DecisionTransformerModel", episodes, {
        **SMALL, "state_dim": 5, "act_dim": 3, "max_ep_len": 20}),
    # Images, as timm has them.
    "timm_vit": _timm("VisionTransformer", img_size=32, patch_size=8, embed_dim=32, depth=2,
                      num_heads=4),
    "timm_mixer": _timm("MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2,
                        num_classes=0),  # the head begins as zeros
    "timm_swin": _timm("SwinTransformer", img_size=32, window_size=4, embed_dim=16,
                       depths=(1, 1), num_heads=(2, 4)),
    "timm_convnext": _timm("ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "timm_cait": _timm("Cait", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm_resnet": _timm("resnet10t"),
    "timm_mobilenet": _timm("mobilenetv3_small_050", drop_rate=0.0),
    "timm_efficientnet": _timm("tinynet_e", drop_rate=0.0),
    "timm_regnet": _timm("regnetx_002"),
    "timm_mobilevit": _timm("mobilevit_xxs"),
    "timm_ghostnet": _timm("ghostnet_050", drop_rate=0.0),
}  # fmt: skip

FAMILIES = tuple(dict.fromkeys(each.family for each in ARCHITECTURES.values()))


def architecture(name: str, *, experts: str | None = None) -> nn.Module:
    """Build `name`, with random weights. experts: Mixtral's, see EXPERTS."""
    line = ARCHITECTURES[name]
    model = getattr(importlib.import_module(line.library), line.model)
    if line.library != "transformers":
        return without_dropout(model(**line.config)).train()
    config = model.config_class(**line.config)
    if experts is not None:
        config.experts_implementation = experts
    drop_nothing(config)
    return without_dropout(model(config)).train()


def drop_nothing(config: Any) -> None:
    """Set to zero whatever is drawn anew in each forward, here and in configurations within."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            drop_nothing(value)
        elif isinstance(value, float) and any(part in key for part in ("drop", "jitter")):
            setattr(config, key, 0.0)


def without_dropout(model: nn.Module) -> nn.Module:
    """`model`, whose modules drop nothing, either."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def architecture_loss(model: Any, name: str, rank: int, step: int) -> Tensor:
    """On data of its own for each rank and step: the model's loss, or the mean square of what it
    gives first."""
    batch = ARCHITECTURES[name].batch
    if batch is None:
        return dit_loss(model, rank, step)
    output = model(**batch(torch.Generator().manual_seed(1000 * step + rank)))
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = first_tensor(output).float().square().mean()
    return loss


def first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output
    return next(value for value in values if isinstance(value, Tensor) and value.requires_grad)
