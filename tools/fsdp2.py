"""Behaviours of FSDP2, those of autoshard in their place, and the tests that show them.

From the public interface and the documentation of torch 2.11 to 2.15, and from what its users and
its own tests rely on. `features.py` writes these rows into docs/features.md.
"""

from __future__ import annotations

SAME = "same"

Row = tuple[str, str, str]
"""Behaviour of FSDP2; ours; and the tests that show it.

Ours is `SAME`, or how it differs, or "not offered", and why. Tests are named from `tests/`, with
`parity/` left out."""

_INIT: tuple[Row, ...] = (
    (
        "one call, one unit: the parameters that no nested call has",
        SAME,
        "parity/unit/test_units::test_training",
    ),
    (
        "a list of modules is one unit",
        SAME,
        "parity/unit/test_units::test_a_unit_of_several_modules_is_gathered_once",
    ),
    (
        "of a list, a forward may run some modules and others be called later",
        "a unit of several modules is let go of when each has run, or the root's forward ends",
        "parity/unit/test_units::test_a_unit_of_several_modules_is_gathered_once",
    ),
    (
        "default mesh: all ranks, on the accelerator, or the CPU",
        SAME,
        "parity/sharding/test_init::test_sharding_sends_nothing",
    ),
    (
        "makes the default process group if there is none",
        "with no torchrun around, a world of one",
        "parity/unit/test_units::test_one_process_needs_no_collective",
    ),
    (
        "1-D mesh shards; 2-D, named, replicates over its first axis",
        SAME,
        "parity/sharding/test_strategies::test_hybrid_on_four_ranks",
    ),
    (
        "a mesh of three axes, or of two without names, is refused",
        SAME,
        "unit/test_errors::test_bad_input "
        "parity/sharding/test_fsdp2_surface::test_errors_are_also_those_of_fsdp2",
    ),
    (
        "a container without forward is refused",
        SAME,
        "unit/test_errors::test_bad_input",
    ),
    (
        "a module is sharded once",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_errors_are_also_those_of_fsdp2",
    ),
    (
        "scalar parameters are refused",
        "trained: they stay whole in their unit, and are reduced with it",
        "parity/unit/test_scalars::test_scalars_are_trained",
    ),
    (
        "parameters that are not contiguous are refused",
        SAME,
        "unit/test_errors::test_bad_input",
    ),
    (
        "uneven rows on dim 0, also fewer rows than ranks",
        SAME,
        "parity/unit/test_units::test_uneven_and_empty_shards",
    ),
    (
        "`shard_placement_fn`: another dim, which ranks must share evenly; negative dims",
        'and `FlatShard()`, through rows, for any number of ranks; "auto" chooses',
        "parity/sharding/test_strategies::test_other_dims_on_two_ranks "
        "parity/sharding/test_strategies::test_wrong_placements "
        "parity/sharding/test_placements::test_fewer_rows_than_ranks",
    ),
    (
        "`shard_placement_fn` may name another mesh (ShardPlacementResult, private)",
        "not offered: a unit has one mesh; give experts a call of `fully_shard` of their own",
        "",
    ),
    (
        "parameters and buffers are moved to the mesh's device",
        SAME,
        "parity/sharding/test_strategies::test_what_is_moved_to_a_device",
    ),
    (
        "`ignored_params` are neither sharded, moved nor reduced",
        SAME,
        "parity/sharding/test_init::test_ignored_params",
    ),
    (
        "meta parameters stay so; the user fills them",
        "`shard()` fills them itself, too",
        "parity/training/test_state::test_meta_init_and_conversion "
        "parity/sharding/test_init::test_meta",
    ),
    (
        "meta parameters at the first forward are an error that names them",
        SAME,
        "unit/test_errors::test_bad_input",
    ),
    (
        "buffers of modules on meta are left without values by `to_empty()`",
        "`shard()` and `load_pretrained()` have modules compute them, or name them in an error",
        "parity/weights/test_pretrained::test_buffers_that_nobody_computes_are_an_error "
        "parity/weights/test_pretrained::test_meta_is_initialised_as_transformers_does",
    ),
    (
        "safetensors of Hugging Face's models are not read",
        "`load_pretrained` and `save_pretrained`: each rank its own part",
        "parity/weights/test_pretrained::test_loads_as_from_pretrained "
        "parity/weights/test_pretrained::test_saves_as_transformers_does",
    ),
    (
        "DDP around a sharded module: an error about DTensors",
        "an error that says what to do; around a compiled one, DDP lets go",
        "parity/sharding/test_ddp::test_ddp_lets_go "
        "parity/sharding/test_ddp::test_ddp_of_a_sharded_model_is_refused",
    ),
    (
        "names in `named_parameters()` and state dicts stay",
        SAME,
        "parity/training/test_state::test_names",
    ),
    (
        "the class is a subclass of the module's own",
        "of the same name, not `FSDP<name>`",
        "parity/unit/test_units::test_class_and_attributes_stay_sane",
    ),
    (
        "`isinstance(module, FSDPModule)`",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_fsdp_module",
    ),
    (
        "a part of a container, by index, is of its own class",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_fsdp_module",
    ),
    (
        "`copy.deepcopy` is refused (AssertionError)",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_errors_are_also_those_of_fsdp2",
    ),
    (
        "ranks of one process group with gaps, or part of the world",
        SAME,
        "parity/sharding/test_init::test_a_group_of_its_own",
    ),
    (
        "one root: a child called before it is an error later",
        "the root is who is called first, each time; nothing to refuse",
        "parity/eager/test_autograd::test_the_root_is_who_is_called_first",
    ),
    (
        "tied parameters of two units are an error at the first forward",
        "they belong to the unit around both",
        "parity/compiled/test_mixes::test_tied_across_a_graph_break "
        "parity/comm/test_counts::test_eager",
    ),
    (
        "tied parameters within a unit",
        SAME,
        "parity/unit/test_units::test_training",
    ),
    (
        "an optimizer built before sharding trains nothing, in silence",
        "it is moved over by the one-line form, and refused at its step otherwise",
        "parity/training/test_state::test_optimizer_built_before_keeps_its_state "
        "unit/test_errors::test_bad_input",
    ),
    (
        "`dp_mesh_dims`: the full mesh, of which names are data-parallel (since 2.13)",
        (
            "the same; a gradient is the sum over those axes divided by their size, also where "
            "FSDP2 leaves one that is not partial as it is"
        ),
        "parity/sharding/test_tensor_parallel::test_a_model_on_one_mesh "
        "parity/sharding/test_tensor_parallel::test_axes_by_wrong_names",
    ),
    (
        "`fully_shard` on tensor-parallel parameters: a DTensor over both meshes",
        SAME,
        "parity/sharding/test_tensor_parallel::test_placements_and_counts",
    ),
    (
        "tensor-parallel, a unit of each kind in one model",
        SAME,
        "parity/sharding/test_tensor_parallel::test_beside_a_plain_model",
    ),
    (
        "`contract`: torch's own `fully_shard` refuses a module that has it",
        "ours refuses what ours has sharded",
        "parity/sharding/test_fsdp2_surface::test_errors_are_also_those_of_fsdp2",
    ),
    (
        "units without parameters, or all of them ignored",
        SAME,
        "parity/sharding/test_init::test_units_without_parameters",
    ),
)

_FORWARD: tuple[Row, ...] = (
    (
        "a gather before a unit's forward, a free after it",
        "the gather is at the first read of a parameter",
        "parity/comm/test_counts::test_eager",
    ),
    (
        "`reshard_after_forward=None` is True, and False for the root",
        SAME,
        "parity/comm/test_counts::test_eager",
    ),
    (
        "False keeps whole parameters until backward; one gather a step",
        SAME,
        "parity/comm/test_counts::test_what_defines_a_strategy",
    ),
    (
        "an int: shards over that many neighbours after forward",
        SAME,
        "parity/sharding/test_strategies::test_shards_over_fewer_ranks_after_forward",
    ),
    (
        "an int that is no factor, or no int, is a ValueError; 1 warns and is False",
        SAME,
        "parity/sharding/test_strategies::test_wrong_int_reshard",
    ),
    (
        "between forward and backward an int registers DTensors of the smaller mesh",
        "the parameters stay the DTensors that optimizers train",
        "parity/sharding/test_strategies::test_shards_over_fewer_ranks_after_forward",
    ),
    (
        "`parameters()` is whole between `unshard()` and `reshard()`",
        "they are attached to autograd, and no leaves: optimizers refuse them",
        (
            "parity/sharding/test_fsdp2_surface::test_parameters_follow_what_is_gathered "
            "parity/sharding/test_fsdp2_surface::test_whole_parameters_in_the_wrong_hands"
        ),
    ),
    (
        "`parameters()` is whole from a forward that keeps to its backward",
        (
            "where `reshard_after_forward=False` was asked for, not for a root by default, and "
            "not for replicas; eager only; attributes of modules are sharded, as inputs of "
            "`torch.autograd.grad` have to be"
        ),
        "parity/sharding/test_fsdp2_surface::test_parameters_follow_what_is_gathered",
    ),
    (
        "`parameters()` is whole inside of forward",
        "sharded there; reads of attributes give whole ones",
        "parity/unit/test_units::test_class_and_attributes_stay_sane",
    ),
    (
        "`parameters()` of a plain module around sharded ones follows them",
        "sharded: call it on a sharded module",
        "parity/sharding/test_fsdp2_surface::test_parameters_follow_what_is_gathered",
    ),
    (
        "after forward under `no_grad` a root that keeps stays whole",
        "it is let go of: no backward comes",
        "parity/comm/test_counts::test_no_grad_gathers_once_and_keeps_nothing",
    ),
    (
        "gradients of what is computed from whole parameters reach the shards",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_gradients_through_parameters",
    ),
    (
        "`zero_grad()` between forward and backward misses the shards",
        "it empties the gradients of the shards, gathered or not",
        "parity/sharding/test_fsdp2_surface::test_whole_parameters_in_the_wrong_hands",
    ),
    (
        "`unshard(async_op=True)` gives a handle; forward waits by itself",
        SAME,
        "parity/sharding/test_methods::test_unshard_and_reshard",
    ),
    (
        "`unshard()` works before the first forward",
        SAME,
        "parity/sharding/test_methods::test_unshard_and_reshard",
    ),
    (
        "`unshard()`, `reshard()` are not recursive",
        SAME,
        "parity/sharding/test_methods::test_unshard_and_reshard",
    ),
    (
        "`reshard()` between forward and backward frees; backward gathers again",
        "compiled code keeps what it saved for backward",
        (
            "parity/sharding/test_fsdp2_surface::test_reshard_between_forward_and_backward "
            "parity/sharding/test_fsdp2_surface::test_reshard_frees_memory"
        ),
    ),
    (
        (
            "parameters written to between forward and backward, after `reshard()` (unsupported"
            " since 2.15)"
        ),
        "RuntimeError in backward, which would compute with other values",
        (
            "parity/sharding/test_fsdp2_surface::test_writes_after_reshard_are_found "
            "parity/unit/test_units::test_weights_changed_between_forward_and_backward"
        ),
    ),
    (
        "writes to whole parameters are lost in silence",
        "RuntimeError that names them",
        (
            "parity/sharding/test_methods::test_unshard_and_reshard "
            "parity/sharding/test_fsdp2_surface::test_writes_after_reshard_are_found"
        ),
    ),
    (
        "`set_reshard_after_forward`, recursive by default; the root's rule ends",
        SAME,
        "parity/sharding/test_methods::test_reshard_after_forward_at_run_time",
    ),
    (
        "on replicated modules it raises AssertionError",
        "it makes no difference",
        "parity/sharding/test_strategies::test_replicate",
    ),
    (
        "`set_modules_to_forward_prefetch` gathers those ahead",
        "compiled, the plan decides",
        "parity/sharding/test_methods::test_forward_prefetch",
    ),
    (
        "elements that are not sharded are a ValueError",
        SAME,
        "parity/sharding/test_methods::test_forward_prefetch",
    ),
    (
        "implicit forward overlap: one gather beside compute",
        "one unit ahead, in the order of the step before",
        "parity/sharding/test_methods::test_forward_prefetch",
    ),
    (
        "`register_fsdp_forward_method`",
        "`autoshard.register_forward_method`",
        "parity/sharding/test_methods::test_methods_other_than_forward",
    ),
    (
        "inputs are cast to `param_dtype`, outputs to `output_dtype`",
        SAME,
        "parity/unit/test_precision::test_dtypes",
    ),
    (
        "inputs in dataclasses and other containers",
        "containers that pytrees know",
        "parity/unit/test_precision::test_containers_that_need_no_cast_are_passed_on",
    ),
    (
        "inputs are moved to the device",
        "not offered: pass them there",
        "",
    ),
    (
        "an output that is a view, written to in place, drops a hook (it warns)",
        "nothing hangs on outputs; autograd has its say",
        "parity/eager/test_autograd::test_writes_to_views_that_units_return",
    ),
    (
        "several outputs, or none that needs a gradient",
        SAME,
        "parity/eager/test_autograd::test_several_outputs "
        "parity/eager/test_autograd::test_gradients_of_the_input_alone",
    ),
    (
        "a module used twice in a forward",
        SAME,
        "parity/comm/test_counts::test_module_used_twice",
    ),
    (
        "several forwards before one backward",
        "as in the replicated model",
        "parity/compiled/test_mixes::test_two_forwards_before_one_backward",
    ),
    (
        "parameters used outside of their module's forward: mixed with DTensors",
        "read in a forward, they are gathered",
        "parity/sharding/test_methods::test_methods_other_than_forward",
    ),
    (
        "`torch.func.functional_call`",
        SAME,
        "parity/unit/test_units::test_functional_call",
    ),
    (
        "inference mode, then training",
        SAME,
        "parity/eager/test_autograd::test_inference_mode_then_training",
    ),
    (
        "evaluation between steps",
        SAME,
        "parity/sharding/test_methods::test_eval_between",
    ),
    (
        "`set_post_optim_event`, waited for once",
        "compiled, too",
        "device/test_streams::test_parity",
    ),
    (
        "`_set_unshard_async_op` (private)",
        "not offered: gathers never run where compute does",
        "parity/sharding/test_fsdp2_surface::test_fsdp_module",
    ),
    (
        "`set_keep_unsharded_storage` (2.15): data pointers that stay",
        "not offered: steps are captured by CUDA graphs without",
        "device/test_cuda_graphs::test_a_captured_step",
    ),
)

_BACKWARD: tuple[Row, ...] = (
    (
        "a unit is gathered again in backward, once",
        SAME,
        "parity/comm/test_counts::test_eager",
    ),
    (
        "backward prefetch: the unit before, in the order of forward",
        SAME,
        "parity/sharding/test_methods::test_backward_prefetch",
    ),
    (
        "`set_modules_to_backward_prefetch`; an empty list is the default",
        "compiled, the plan decides",
        "parity/sharding/test_methods::test_backward_prefetch",
    ),
    (
        "`set_unshard_in_backward(False)`",
        "what backward asks for all the same is gathered then",
        "parity/sharding/test_methods::test_wrong_flags "
        "parity/eager/test_autograd::test_no_gather_for_a_frozen_first_block",
    ),
    (
        "gradients are reduce-scattered, and averaged",
        SAME,
        "parity/unit/test_units::test_training",
    ),
    (
        "with replicas all-reduced after that",
        SAME,
        "parity/sharding/test_strategies::test_hybrid_on_four_ranks",
    ),
    (
        "one reduce-scatter in flight at most",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_reduces_in_flight",
    ),
    (
        "`set_reduce_scatter_max_input_buffers`; TypeError, ValueError",
        "compiled, the plan decides",
        "parity/sharding/test_fsdp2_surface::test_reduces_in_flight",
    ),
    (
        "`set_separate_reduce_scatter_group`",
        "compiled, too",
        (
            "parity/sharding/test_fsdp2_surface::test_separate_group_for_reduces "
            "parity/sharding/test_fsdp2_surface::test_separate_groups_beside_replicas"
        ),
    ),
    (
        "on replicated modules it raises AssertionError",
        "it makes no difference",
        "parity/sharding/test_fsdp2_surface::test_separate_groups_beside_replicas",
    ),
    (
        "`set_custom_all_gather`",
        "one call a dtype; compiled, gathered when a graph begins, and kept until its backward",
        "parity/sharding/test_fsdp2_surface::test_custom_communication",
    ),
    (
        "`set_custom_reduce_scatter`",
        "op is always SUM: division is ours; compiled, too",
        "parity/sharding/test_fsdp2_surface::test_custom_communication",
    ),
    (
        "a custom buffer may be used again",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_custom_communication_of_single_parameters",
    ),
    (
        "`set_allocate_memory_from_process_group_for_comm`; plain memory where there is none",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_memory_of_the_process_group",
    ),
    (
        "`set_symm_mem_for_comm`",
        "ValueError at once where the mesh has no CUDA devices; not yet run on some",
        "parity/sharding/test_fsdp2_surface::test_memory_of_the_process_group",
    ),
    (
        "both raise AssertionError after custom communication",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_custom_communication",
    ),
    (
        "`set_all_reduce_hook`, after the reduce-scatter or the all-reduce",
        "it sees the mean, 1-D",
        "parity/sharding/test_methods::test_all_reduce_hook",
    ),
    (
        "a stream for that hook, refused with replicas",
        SAME,
        "device/test_streams::test_parity",
    ),
    (
        "`set_gradient_divide_factor`, not recursive",
        SAME,
        "parity/sharding/test_strategies::test_divide_factor",
    ),
    (
        "`set_reduce_scatter_divide_factor`, deprecated",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_former_names",
    ),
    (
        "`set_force_sum_reduction_for_comms`",
        "collectives only sum, divisions are beside them; else those of NCCL may give means",
        "parity/sharding/test_strategies::test_sums_that_collectives_do_not_divide",
    ),
    (
        "`set_reduce_scatter_unused_params`",
        "ranks that use different parameters are right without it",
        (
            "parity/sharding/test_methods::test_unused_parameters_get_zeros_if_asked_for "
            "parity/ranks/test_ranks_differ::test_each_rank_has_gradients_of_its_own_experts"
        ),
    ),
    (
        "parameters without a gradient on any rank get none",
        SAME,
        "parity/training/test_optimizers::test_none_is_not_zero",
    ),
    (
        "float16 sums are divided before and after",
        SAME,
        "parity/sharding/test_strategies::test_large_and_small_half_precision_gradients",
    ),
    (
        "`set_requires_gradient_sync(False)`: no collective, whole gradients wait",
        "`.grad` has zeros meanwhile, and who zeroes it drops what waits",
        "parity/eager/test_accumulation::test_no_sync "
        "parity/eager/test_accumulation::test_zero_grad_drops_what_waits",
    ),
    (
        "they are accumulated in `reduce_dtype`",
        SAME,
        "parity/eager/test_accumulation::test_accumulates_in_the_reduce_dtype",
    ),
    (
        "`set_requires_all_reduce(False)`: reduce-scattered sums wait",
        SAME,
        "parity/eager/test_accumulation::test_sums_that_wait_for_their_all_reduce",
    ),
    (
        "a step while gradients wait trains with half of them",
        "RuntimeError",
        "parity/eager/test_accumulation::test_step_while_gradients_wait",
    ),
    (
        "`set_reshard_after_backward(False)`",
        SAME,
        "parity/eager/test_accumulation::test_parameters_kept_after_backward",
    ),
    (
        "`set_is_last_backward(False)`: backward ends before its reduces",
        SAME,
        "parity/comm/test_waits::test_only_a_backward_that_is_not_the_last_ends_before_its_reduces",
    ),
    (
        "`set_manual_backward_finalization`, `finalize_backward` (2.15), with a handle",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_backward_finalized_by_hand",
    ),
    (
        "torch.distributed.pipelining tells stages when to reduce",
        SAME,
        "parity/sharding/test_fsdp2_surface::test_stages_of_a_pipeline",
    ),
    (
        "`share_comm_ctx`",
        "streams are shared in any case",
        "parity/sharding/test_fsdp2_surface::test_shared_streams",
    ),
    (
        "`reset_iter_state` after an exception, on the root",
        SAME,
        "parity/sharding/test_methods::test_reset_after_an_exception",
    ),
    (
        "post-accumulate-grad hooks see the reduced shard: an optimizer in backward",
        SAME,
        "parity/eager/test_accumulation::test_optimizer_in_backward",
    ),
    (
        "of hooks on parameters, post-accumulate-grad ones alone run",
        "gradient hooks run, too, once, with the reduced shard",
        "parity/eager/test_accumulation::test_hooks_run_once_with_the_reduced_gradient",
    ),
    (
        "`torch.autograd.grad` of sharded parameters",
        "it gives reduced shards, and leaves `.grad` alone",
        "parity/ranks/test_ranks_differ::test_autograd_grad",
    ),
    (
        "double backward fails in the middle",
        "refused with a message",
        "parity/eager/test_accumulation::test_gradients_of_gradients",
    ),
    (
        "two backwards through one graph",
        "as in the replicated model",
        "parity/eager/test_accumulation::test_two_backwards_through_one_graph",
    ),
    (
        "activation checkpointing, both kinds, around and inside of units",
        SAME,
        "parity/eager/test_autograd::test_nested_units_checkpointed_twice_forward "
        "parity/comm/test_counts::test_eager",
    ),
    (
        "frozen parameters beside trainable ones: only the latter are sent",
        SAME,
        "parity/sharding/test_wrap::test_a40_frozen_and_trainable_parameters_in_one_unit",
    ),
    (
        "units frozen in whole are gathered and not reduced",
        SAME,
        "parity/comm/test_counts::test_frozen_units",
    ),
    (
        "freezing and unfreezing between steps",
        SAME,
        "parity/sharding/test_methods::test_frozen_and_unfrozen",
    ),
    (
        "no `record_stream`: memory is the same in each step",
        SAME,
        "device/test_streams::test_memory_stays",
    ),
    (
        "peak memory",
        "not above FSDP2's",
        "parity/compiled/test_memory::test_not_above_fsdp2",
    ),
    (
        "ranks that differ in order hang",
        "RuntimeError that says who waits for what",
        "parity/ranks/test_ranks_differ::test_ranks_that_wait_for_each_other_elsewhere",
    ),
)

_STATE: tuple[Row, ...] = (
    (
        "parameters are DTensors of the whole size",
        SAME,
        "parity/training/test_state::test_values_are_true_global_dtensors",
    ),
    (
        "`state_dict()` reshards first",
        "it has the shards whatever is gathered, and reshards nothing",
        "parity/training/test_checkpoint::test_shards_after_any_forward",
    ),
    (
        "torch.distributed.checkpoint, sharded and full state dicts",
        SAME,
        "parity/training/test_checkpoint::test_sharded_state_dicts "
        "parity/training/test_checkpoint::test_full_state_dicts",
    ),
    (
        "checkpoints of one load into the other",
        SAME,
        "parity/training/test_checkpoint::test_checkpoints_of_fsdp2",
    ),
    (
        "another number of ranks",
        SAME,
        "parity/training/test_checkpoint::test_another_number_of_ranks",
    ),
    (
        "`load_state_dict(assign=True)` with DTensors",
        SAME,
        "parity/training/test_state::test_assigned_parameters_are_used_at_once",
    ),
    (
        "assigned plain tensors are taken, and fail later",
        "they are refused in `load_state_dict`",
        "parity/training/test_checkpoint::test_assigned_plain_tensors_are_an_error",
    ),
    (
        "a state dict kept from before shares memory with the shards",
        SAME,
        "parity/training/test_checkpoint::test_cached_state_dict",
    ),
    (
        "`model.to(dtype)` after sharding",
        SAME,
        "parity/training/test_checkpoint::test_conversion_in_mid_training",
    ),
    (
        "`model.to()` reshards first",
        "what was gathered is stale after it, and gathered anew",
        "parity/training/test_checkpoint::test_conversion_in_mid_training",
    ),
    (
        "`torch.nn.utils.clip_grad_norm_` on DTensors",
        "and one collective for all: `model.clip_grad_norm_`",
        "parity/training/test_clip::test_equals_replicated "
        "parity/test_tutorial::test_only_the_import_line_changes",
    ),
    (
        "norms of plain, replicated and sharded parameters together",
        SAME,
        "parity/training/test_clip::test_plain_parameters_count_once "
        "parity/training/test_clip::test_axes_that_replicate",
    ),
    (
        "GradScaler: an inf on one rank skips the step on all",
        SAME,
        "parity/training/test_optimizers::test_scaler_skips_on_all_ranks",
    ),
    (
        "foreach and fused optimizers",
        SAME,
        "parity/training/test_optimizers::test_foreach_and_fused",
    ),
    (
        "the tutorial, start to end",
        SAME,
        "parity/test_tutorial::test_only_the_import_line_changes",
    ),
)

_PRECISION: tuple[Row, ...] = (
    (
        "`param_dtype`: gathers and compute; shards in their own dtype",
        SAME,
        "parity/unit/test_precision::test_dtypes",
    ),
    (
        "`reduce_dtype`: by default that of the gradient (to 2.13), the parameter's (2.15)",
        "that of the gradient, on every version",
        "parity/unit/test_precision::test_dtypes",
    ),
    (
        "parameters of several dtypes in a unit: AssertionError to 2.13, for those that train",
        "one collective a dtype",
        "parity/unit/test_precision::test_dtypes_mixed_in_one_unit",
    ),
    (
        "`cast_forward_inputs=False`",
        SAME,
        "parity/unit/test_precision::test_dtypes",
    ),
    (
        "buffers are not cast",
        "unless `buffer_dtype` says so",
        "parity/unit/test_precision::test_buffers",
    ),
    (
        "`param_dtype_override_fn` (2.15)",
        "not offered: make what is to stay a unit of its own",
        "parity/unit/test_precision::test_batch_norm_stays_in_full_precision",
    ),
    (
        "norm layers in float32 as units of their own",
        SAME,
        "parity/unit/test_precision::test_batch_norm_stays_in_full_precision",
    ),
    (
        "torch's `MixedPrecisionPolicy` and `CPUOffloadPolicy` are taken",
        SAME,
        "parity/unit/test_precision::test_torchs_own_policy",
    ),
    (
        "casts are repeated where a checkpoint runs forward again",
        SAME,
        "parity/unit/test_precision::test_casts_are_repeated_when_a_checkpoint_runs_again",
    ),
    (
        "`CPUOffloadPolicy`: shards, gradients and optimizer states on the host",
        SAME,
        "parity/eager/test_autograd::test_offload",
    ),
    (
        "optimizer states on the host (not in FSDP2)",
        "`OptimizerOffloadPolicy`",
        "parity/training/test_host_states::test_as_the_replicated_model",
    ),
    (
        "gradients that wait, beside offload",
        SAME,
        "parity/eager/test_accumulation::test_accumulation_beside_offload",
    ),
    (
        "`fsdp_pre_all_gather`, `fsdp_post_all_gather` of tensor subclasses",
        SAME,
        "parity/unit/test_extensions::test_a_subclass_equals_fsdp2",
    ),
    (
        "one of the two alone, or other arguments: AssertionError",
        SAME,
        "parity/unit/test_extensions::test_errors "
        "parity/sharding/test_fsdp2_surface::test_errors_are_also_those_of_fsdp2",
    ),
    (
        "uneven shards must send padded rows",
        "they are padded for it",
        "parity/unit/test_extensions::test_uneven_shards_equal_the_replicated_model",
    ),
    (
        "extensions and an int `reshard_after_forward` are refused",
        SAME,
        "parity/unit/test_extensions::test_resharding_to_fewer_ranks_is_refused",
    ),
)

_REPLICATE: tuple[Row, ...] = (
    (
        "`replicate`: whole parameters, one all-reduce a unit",
        SAME,
        "parity/sharding/test_strategies::test_replicate",
    ),
    (
        "a 1-D mesh, or another is refused",
        "(replicate, 1) is taken, too",
        "parity/sharding/test_strategies::test_replicate_meshes",
    ),
    (
        "`device_id`",
        SAME,
        "parity/sharding/test_strategies::test_replicate_device_id",
    ),
    (
        "replicated and sharded units in one model, in any order",
        SAME,
        "parity/sharding/test_strategies::test_orders_of_composition",
    ),
    (
        "`ignored_params`",
        SAME,
        "parity/sharding/test_strategies::test_replicate_ignores_parameters",
    ),
    (
        "a child alone, then the root",
        SAME,
        "parity/sharding/test_strategies::test_a_child_alone_then_the_root",
    ),
    (
        "`isinstance(module, ReplicateModule)`",
        "not offered: they are `FSDPModule`s",
        "parity/sharding/test_fsdp2_surface::test_fsdp_module",
    ),
)

_COMPILE: tuple[Row, ...] = (
    (
        "torch.compile of blocks, each with hooks around it",
        "hooks are traced; collectives are in the graph",
        "parity/compiled/test_mixes::test_compiled_blocks_in_an_eager_model",
    ),
    (
        "torch.compile of the model breaks the graph at each unit",
        "one graph",
        "parity/comm/test_counts::test_compiled",
    ),
    (
        "torch.compile with autoshard of what torch's `fully_shard` has sharded",
        "units, shards, settings and optimizers are taken over at the first call",
        "parity/sharding/test_from_fsdp2::test_fsdp2_then_compiled "
        "parity/sharding/test_from_fsdp2::test_settings_are_kept",
    ),
    (
        "`fullgraph=True` on the model fails",
        "it works",
        "parity/sharding/test_fsdp2_surface::test_one_full_graph",
    ),
    (
        "compiled equals eager",
        "bit for bit, without Inductor",
        "parity/test_matrix::test_every_combination_compiled",
    ),
    (
        "FSDP2MemTracker, which asks for its state",
        "not offered: NotImplementedError; `autoshard plan` predicts memory",
        "parity/sharding/test_fsdp2_surface::test_fsdp_module "
        "parity/tools/test_predicted_memory::test_by_category",
    ),
)

SECTIONS: dict[str, tuple[Row, ...]] = {
    "Sharding": _INIT,
    "Forward": _FORWARD,
    "Backward": _BACKWARD,
    "State": _STATE,
    "Precision, offload, extensions": _PRECISION,
    "Replicas": _REPLICATE,
    "Compiled": _COMPILE,
}
