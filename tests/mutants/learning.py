"""Planted bugs of algorithms and of trained candidates: a formula, a group of mixed versions, images not kept."""

from engine.algorithm.awm import matching_log_prob
from engine.algorithm.diffusion_nft import noised_rows
from engine.algorithm.flow_dppo import dppo_losses
from engine.exploration.explorer import Explorer
from engine.models import lora
from engine.models.load import ReferencePolicy
from engine.trainer.candidates import CandidateImages
from engine.trainer.loop import Loop
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

FORMULAS = "tests/engine/test_objectives.py"
CANDIDATES = "tests/engine/test_candidates.py"

LORA = "tests/engine/test_lora.py"

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="awm-weighs-no-noise-level",
            forgets="the noise level in AWM's likelihood",
            patches=(everywhere(matching_log_prob, changed(matching_log_prob, "-sigma.double() * grown", "-grown")),),
            found_by=f"{FORMULAS}::test_awms_likelihood_equals_the_published_one_and_so_does_its_gradient",
        ),
        Fault(
            name="a-converter-may-drop-a-module",
            forgets="to see which modules of a LoRA arrive behind diffusers' converter",
            patches=((lora, "_converted", changed(lora._converted, "if number not in numbers", "if False")),),
            found_by=f"{LORA}::test_names_that_a_converter_drops_without_a_word_are_refused",
        ),
        Fault(
            name="a-continued-lora-is-not-scaled",
            forgets="the alpha / rank of the job, when its adapters begin with somebody else's factors",
            patches=(everywhere(lora.start_from, changed(lora.start_from, "pair.b / scale", "pair.b")),),
            found_by=f"{LORA}::test_a_continued_lora_of_any_larger_rank_begins_where_a_merged_one_does",
        ),
        Fault(
            name="the-base-is-the-reference-of-a-continued-lora",
            forgets="that a run with a continued LoRA begins with more than its base",
            patches=(
                (
                    ReferencePolicy,
                    "of",
                    changed(
                        ReferencePolicy.of.__func__,  # type: ignore[attr-defined]
                        " and not getattr(adapter.transformer, _CONTINUES, False)",
                        "",
                    ),
                ),
            ),
            found_by=f"{LORA}::test_a_continued_lora_of_any_larger_rank_begins_where_a_merged_one_does",
        ),
        Fault(
            name="a-far-step-is-never-trained",
            forgets="that Flow-DPPO trains a step beyond the limit that leads back",
            patches=(
                everywhere(
                    dppo_losses, changed(dppo_losses, "(divergence >= limit) & leads_away", "divergence >= limit")
                ),
            ),
            found_by=f"{FORMULAS}::test_flow_dppo_equals_the_published_formula_to_1e_12_in_double_precision",
        ),
        Fault(
            name="every-level-has-the-noise-of-the-first",
            forgets="the level, when it draws the noise of a trained image",
            patches=(everywhere(noised_rows, changed(noised_rows, "FIRST_NOISE + k", "FIRST_NOISE")),),
            found_by=f"{FORMULAS}::test_rows_of_drawn_levels_have_the_noise_of_their_level",
        ),
        Fault(
            name="a-group-is-taken-with-images-missing",
            forgets="that a group is taken whole from candidates",
            patches=(
                (
                    CandidateImages,
                    "with_early_groups",
                    changed(CandidateImages.with_early_groups, "if all((group", "if any((group"),
                ),
            ),
            found_by=f"{CANDIDATES}::test_a_group_is_taken_whole_or_rolled_out_whole",
        ),
        Fault(
            name="a-checkpoint-has-no-candidates",
            forgets="the images of the next batch, when it writes a checkpoint",
            patches=(
                (
                    Loop,
                    "run_iteration",
                    changed(Loop.run_iteration, "if files is not None and len(self.exploration.images):", "if False:"),
                ),
            ),
            found_by=f"{CANDIDATES}::test_a_lost_machine_trains_the_candidates_of_its_checkpoint",
        ),
        Fault(
            name="candidates-send-no-latents",
            forgets="that candidates are trained, when it orders them",
            patches=((Explorer, "order", changed(Explorer.order, "latents=trains", "latents=False")),),
            found_by=f"{CANDIDATES}::test_only_the_first_batch_is_rolled_out_and_every_later_one_is_its_candidates",
        ),
    )
}
