"""More architectures, and what users do wrong: masks, towers, caches, names, conversions."""

import copy
import threading

import pytest
import torch
import transformers as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers_models import batch, make

from implicit_attention import Anderson
from implicit_attention.integrations.transformers import attach, convert, register, report

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOWED = {**GROUPED, "head_dim": 8, "sliding_window": 4}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 4}
LATENT = {**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 16}
LLAMA4 = {**GROUPED, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "no_rope_layers": [1, 0]}
LLAMA4 |= {"attention_chunk_size": 4, "attn_temperature_tuning": True, "floor_scale": 2}
GEMMA3N = {**WINDOWED, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA3N |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60, "num_kv_shared_layers": 2}
GEMMA3N |= {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
MODERNBERT = {**SIZES, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 1}
T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
SPEECH = {**SIZES, "conv_dim": [16, 16], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
WHISPER = {**BART, "vocab_size": 60, "max_source_positions": 20, "max_target_positions": 20, "num_mel_bins": 16}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2}
SEGFORMER = {"num_encoder_blocks": 1, "depths": [1], "sr_ratios": [2], "hidden_sizes": [16], "patch_sizes": [3]}
SEGFORMER |= {"strides": [2], "num_attention_heads": [2], "mlp_ratios": [2]}
BACKBONE = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
BACKBONE.out_features = ["stage2"]
READER = hf.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, add_cross_attention=True)
TEXT = hf.BertConfig(**{key: value for key, value in SIZES.items() if not key.endswith("_id")})
COMPOSITE = hf.EncoderDecoderConfig.from_encoder_decoder_configs(TEXT, READER)
IMAGE = 55
LLAVA = {"text_config": hf.LlamaConfig(**GROUPED), "vision_config": hf.CLIPVisionConfig(**VISION)}
LLAVA |= {"image_token_id": IMAGE, "vision_feature_layer": -1}
WINDOWS = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
WINDOWS |= {"patch_size": 4, "window_size": 8, "fullatt_block_indexes": [1]}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN = {"text_config": {**GROUPED, "rope_parameters": ROPE}, "vision_config": WINDOWS, "image_token_id": IMAGE}
QWEN |= {"vision_start_token_id": 56, "video_token_id": 57}
TILES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1}
TILES |= {"attention_heads": 4, "image_size": 16, "patch_size": 8, "max_num_tiles": 2, "vision_output_dim": 64}
TILES |= {"intermediate_layers_indices": [1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
MLLAMA = {"text_config": {**GROUPED, "cross_attention_layers": [1]}, "vision_config": TILES}


def model(name, dtype=torch.float32):
    """A model whose attention is far from uniform."""
    torch.manual_seed(0)
    kind, config, _ = MODELS[name]
    kind, config = getattr(hf, kind), copy.deepcopy(config)
    made = kind(kind.config_class(**config) if isinstance(config, dict) else config)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
            elif "bias" in key or "gate" in key:
                parameter.normal_(0.0, 0.3)
    return made.to(dtype).eval()


def inputs(name):
    return MODELS[name][2]()


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tokens(length=9, padding=3, left=False, images=0, masked=True):
    ids = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(2))
    ids[:, 1 : 1 + images] = IMAGE
    mask = torch.ones_like(ids)
    mask[0, slice(padding) if left else slice(length - padding, None)] = 0
    return {"input_ids": ids, "attention_mask": mask} if masked else {"input_ids": ids}


def decoder():
    return tokens(left=True)


def seq2seq():
    return {**tokens(), "decoder_input_ids": tokens(5, masked=False)["input_ids"]}


def image():
    return {"pixel_values": random(2, 3, 16, 16)}


def speech():
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[0, -80:] = 0
    return {"input_values": random(2, 200), "attention_mask": mask}


def detection():
    mask = torch.ones(2, 32, 32, dtype=torch.long)
    mask[0, :, 16:] = 0
    return {"pixel_values": random(2, 3, 32, 32), "pixel_mask": mask}


def tiles():
    ratios = {"aspect_ratio_ids": torch.tensor([[1], [2]]), "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]])}
    seen = torch.ones(2, 9, 1, 2, dtype=torch.long)
    return {**decoder(), **ratios, "pixel_values": random(2, 1, 2, 3, 16, 16), "cross_attention_mask": seen}


def patches():
    given = tokens(10, 2, images=4)
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    kinds = (given["input_ids"] == IMAGE).long()
    return {**given, "pixel_values": random(32, 96), "image_grid_thw": grid, "mm_token_type_ids": kinds}


def illustrated():
    return {**tokens(20, 2, images=16), **image()}


def sound():
    return {"input_features": random(2, 16, 40), "decoder_input_ids": tokens(5, masked=False)["input_ids"]}


# What each of them adds: the shapes, masks and arguments that reach attention.
MODELS = {
    # Values of another size than keys.
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT, decoder),
    # Chunks instead of a window, and queries scaled by their position.
    "llama4": ("Llama4ForCausalLM", LLAMA4, decoder),
    # Layers that attend to the keys of others.
    "gemma3n": ("Gemma3nForCausalLM", GEMMA3N, decoder),
    # Layers with and without a window.
    "cohere2": ("Cohere2ForCausalLM", {**WINDOWED, "layer_types": None}, decoder),
    "modernbert": ("ModernBertForMaskedLM", MODERNBERT, tokens),
    # An additive mask of its own for each head.
    "doge": ("DogeForCausalLM", {**GROUPED, "keep_window_size": 4}, decoder),
    # Queries scaled before attention.
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, decoder),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, sound),
    # One module for all layers.
    "albert": ("AlbertForMaskedLM", {**SIZES, "embedding_size": 16}, tokens),
    # Masks of the model's own making, (B, 1, 1, M).
    "layoutlm": ("LayoutLMForMaskedLM", SIZES, tokens),
    "bart": ("BartForConditionalGeneration", {**BART, "vocab_size": 60, "max_position_embeddings": 64}, seq2seq),
    # Position biases and no scale, of every layer its own.
    "umt5": ("UMT5ForConditionalGeneration", T5, seq2seq),
    "encoder_decoder": ("EncoderDecoderModel", COMPOSITE, seq2seq),
    "vit": ("ViTModel", VISION, image),
    # Windows of an image as further batch entries, with a bias.
    "swin": ("SwinModel", SWIN, image),
    # More queries than keys.
    "segformer": ("SegformerModel", SEGFORMER, image),
    "detr": ("DetrForObjectDetection", {**BART, "backbone_config": BACKBONE, "num_queries": 5}, detection),
    "wav2vec2": ("Wav2Vec2Model", SPEECH, speech),
    # Scores of relative positions as the mask.
    "wav2vec2_conformer": ("Wav2Vec2ConformerModel", {**SPEECH, "position_embeddings_type": "relative"}, speech),
    "llava": ("LlavaForConditionalGeneration", LLAVA, illustrated),
    # Packed images: attention is called for each window.
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", QWEN, patches),
    "mllama": ("MllamaForConditionalGeneration", MLLAMA, tiles),
}
every = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


def output(model, given, attention="equilibrium"):
    """Of the tokens that exist."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        found = model(**given)
    found = found.logits if hasattr(found, "logits") else found[0]
    mask = given.get("attention_mask")
    if mask is None or mask.shape != found.shape[:2]:
        return found
    return found[mask.bool()]


def rows(model):
    return {row.name: row for row in report(model)}


# Architectures.


@every
def test_no_step_is_the_eager_model(name):
    given, made = inputs(name), model(name)
    eager = output(made, given, "eager")
    # No architecture has attention that is out of reach.
    ours = output(attach(made, max_steps=0), given)
    assert all(row.num_evals == 0 for row in rows(made).values())
    assert (ours - eager).abs().max() <= 1e-5 * max(1.0, float(eager.abs().max()))


@every
def test_equilibria_are_found_differ_and_are_differentiated(name):
    given, made = inputs(name), model(name)
    register(max_steps=0)
    explicit = output(made, given)
    register(on_failure="raise")
    ours = output(made, given)
    assert (ours - explicit).abs().max() > 1e-3 * explicit.abs().max()
    moved = {}
    for attention in ("equilibrium", "eager"):
        made.set_attn_implementation(attention)
        made.zero_grad()
        found = made(**given)
        found = found.logits if hasattr(found, "logits") else found[0]
        found.square().mean().backward()
        if attention == "equilibrium":
            for row in report(made):
                assert row.converged == 1, row.name
                assert row.num_evals > 1, row.name
        reached = {key: parameter.grad for key, parameter in made.named_parameters() if parameter.grad is not None}
        assert all(gradient.isfinite().all() for gradient in reached.values())
        # Beside the largest: where all tokens are equal, as in the first layer of a decoder, only rounding is left.
        least = 1e-7 * max(gradient.norm() for gradient in reached.values())
        moved[attention] = {key for key, gradient in reached.items() if gradient.norm() > least}
    # Every parameter that softmax attention trains.
    assert moved["equilibrium"] >= moved["eager"]


GENERATING = {name: {"do_sample": False} for name in ("bart", "llama4", "gemma3n", "deepseek_v3", "opt", "qwen2_5_vl")}
GENERATING["cohere2"] = {"num_beams": 3}
GENERATING["doge"] = {"num_beams": 2, "num_return_sequences": 2}


@pytest.mark.parametrize("name", GENERATING)
def test_generating_without_a_step_is_generating_eagerly(name):
    given, made = inputs(name), model(name)
    given.pop("decoder_input_ids", None)
    register(max_steps=0)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for attention in ("equilibrium", "eager"):
        made.set_attn_implementation(attention)
        answer = made.generate(**given, **options, **GENERATING[name])
        found.append((answer.sequences, torch.stack(answer.logits)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


# Masks and caches.


def forward(query, key, value, mask, **given):
    return ALL_ATTENTION_FUNCTIONS["equilibrium"](torch.nn.Module(), query, key, value, mask, **given)[0]


def attention(rows=3, count=10):
    return random(2, 4, rows, 8), random(2, 2, count, 8), random(2, 2, count, 8).flip(2)


@pytest.mark.parametrize("max_steps", [0, None])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_what_was_never_written_into_a_cache_stays_out(garbage, additive, max_steps):
    register(max_steps=max_steps, on_failure="raise")
    query, key, value = attention()
    written = torch.zeros(2, 1, 3, 10, dtype=torch.bool)
    written[..., :6] = True
    mask = torch.zeros(2, 1, 3, 10).masked_fill(~written, -torch.inf) if additive else written
    expected = forward(query, key, value, mask)
    key[:, :, 6:] = value[:, :, 6:] = garbage
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = forward(*leaves, mask)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    for leaf in leaves:
        assert leaf.grad[:, :, :6].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_steps", [0, None])
def test_a_row_that_may_attend_to_nothing_is_finite(dtype, max_steps):
    register(max_steps=max_steps, on_failure="raise")
    query, key, value = (tensor.to(dtype) for tensor in attention())
    mask = torch.zeros(2, 1, 3, 10, dtype=dtype)
    mask[0, :, 0] = torch.finfo(dtype).min
    bias = 30 * random(1, 4, 3, 10).to(dtype)
    assert forward(query, key, value, mask, position_bias=bias).isfinite().all()
    assert not forward(query, key, value, mask == 0)[0, 0].any()
    plain = forward(query, key, value, torch.zeros_like(mask))
    assert torch.equal(forward(query, key, value, mask)[1], plain[1])


def test_a_token_that_is_not_finite_and_not_there_changes_nothing():
    made, given = make("llama", torch.float32), batch("llama", padding=3)
    embedded = made.get_input_embeddings()(given.pop("input_ids")).detach()
    before = output(made, {**given, "inputs_embeds": embedded})
    embedded[0, 0] = torch.nan
    register(on_failure="ignore")
    assert torch.equal(output(made, {**given, "inputs_embeds": embedded}), before)


# Use.


def test_threads_share_a_model():
    made, given = make("llama", torch.float32), batch("llama", padding=3)
    expected = output(made, given)
    found = []
    threads = [threading.Thread(target=lambda: found.append(output(made, given))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(torch.equal(one, expected) for one in found)


def test_training_follows_inference_mode():
    made, given = make("llama", torch.float32), batch("llama")
    made.set_attn_implementation("equilibrium")
    with torch.inference_mode():
        made(**given)
        convert(made, schedule=[0.8], inputs=given)
    made.train()
    made(**given).logits.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())
    assert all(row.gradient == 1 for row in report(made))


@pytest.mark.slow
@pytest.mark.parametrize("helped", ["an assistant", "lookup"])
def test_help_in_generating_changes_no_word(helped):
    register(solver=Anderson(rtol=1e-10, atol=1e-11), on_failure="raise")
    made, helper = make("llama"), make("llama")
    made.set_attn_implementation("equilibrium")
    helper.set_attn_implementation("eager")
    help = {"assistant_model": helper} if helped == "an assistant" else {"prompt_lookup_num_tokens": 2}
    ids, options = batch("llama", rows=1)["input_ids"], {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(made.generate(ids, **options), made.generate(ids, **options, **help))


def test_towers_may_differ():
    made, given = model("llava"), illustrated()
    made.set_attn_implementation({"text_config": "equilibrium", "vision_config": "eager"})
    made(**given)
    assert all("language_model" in name for name in rows(made))


def test_a_conversion_reaches_layers_that_its_inputs_do_not_and_stays_through_a_file(tmp_path):
    made, given = model("llava"), illustrated()
    convert(made, schedule=[0.9], inputs=tokens())
    expected = output(made, given)
    made.save_pretrained(tmp_path)
    loaded = hf.LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="equilibrium").eval()
    assert torch.equal(output(loaded, given), expected)
    assert {row.anchor for each in (made, loaded) for row in report(each)} == {0.9}


# Models that keep arguments, masks or layers to themselves.


def agrees_or_raises(made, given):
    """Whether a model answers as it does eagerly, or says that it cannot."""
    register(max_steps=0)
    eager = output(made, given, "eager")
    made.config._attn_implementation = "equilibrium"
    try:
        ours = output(made, given)
    except ValueError:
        return True
    return bool((ours - eager).abs().max() <= 1e-5 * eager.abs().max())


@pytest.mark.parametrize("name", ["bloom", "git", "bigbird_pegasus"])
def test_a_model_that_attends_on_its_own_gets_no_mask_that_it_misreads(name):
    torch.manual_seed(0)
    given = tokens()
    if name == "bloom":
        made = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4))
    elif name == "git":
        made, given = hf.GitForCausalLM(hf.GitConfig(vision_config=VISION, **SIZES)), {**given, **image()}
    else:
        config = {**BART, "max_position_embeddings": 64, "attention_type": "original_full"}
        made = hf.BigBirdPegasusForConditionalGeneration(hf.BigBirdPegasusConfig(**config))
        given = seq2seq()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.25)
    assert agrees_or_raises(made.eval(), given)


def test_text_without_a_cross_attention_mask_sees_the_whole_image():
    given, made = tiles(), model("mllama")
    del given["cross_attention_mask"]
    assert agrees_or_raises(made, given)


def test_a_decoder_may_have_more_layers_than_its_encoder():
    config = hf.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=3, num_heads=4)
    made = hf.T5ForConditionalGeneration(config).eval()
    register(layers={2: {"anchor": 0.9}})
    output(made, seq2seq())
    assert {name for name, row in rows(made).items() if row.anchor == 0.9} == {
        f"decoder.block.2.layer.{part}" for part in ("0.SelfAttention", "1.EncDecAttention")
    }


def test_a_report_is_of_the_forward_not_of_what_became_of_its_cache():
    made, given = make("llama", torch.float32), batch("llama")
    made.set_attn_implementation("equilibrium")
    cache = hf.StaticCache(config=made.config, max_cache_len=20)
    with torch.no_grad():
        made(**given, past_key_values=cache)
    before = report(made)[0].effective_keys
    cache.reset()
    assert report(made)[0].effective_keys == before
