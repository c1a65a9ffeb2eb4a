from importlib.resources import files
from pathlib import Path

import pytest

from engine.config import CandidateBudget, EngineConfig, SecondsBudget
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.job.schema import Job


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def test_the_quickstart_job_matches_the_readme(tmp_path):
    job = load_job(Path(str(files("sky_yamls") / "quickstart.yaml"))).job
    assert (job.name, job.infra, job.iterations, job.clock_factor) == ("quickstart", "local", 45, "auto")
    assert (job.algorithm.prompts_per_batch, job.algorithm.images_per_prompt) == (12, 4)
    assert (job.algorithm.name, job.sampler.steps, job.sampler.noise_level) == ("diffusion-nft", 8, 0.0)
    assert job.exploration.budget == CandidateBudget(candidates=72, patience_seconds=120)
    assert (job.target.metric, job.target.value, job.target.evaluations) == ("exact_match", 0.95, 3)
    assert (job.evaluation.prompts, job.evaluation.every) == (512, 3)
    assert (job.resources.trainer.use_spot, job.resources.rollout.use_spot) == (True, True)
    assert (job.resources.rollout.accelerator, job.resources.rollout.gpus, job.resources.rollout.num_nodes) == (
        "L40S",
        1,
        2,
    )
    assert (job.budget.max_total, job.budget.max_hourly) == (20_000_000, 10_000_000)
    assert (job.preemptions.trace, job.preemptions.notice) == ("none", 120_000)
    assert [(plan.iteration, plan.slots, plan.notice) for plan in job.preemptions.at] == [
        (3, ("spot-0",), True),
        (6, ("spot-1",), False),
        (9, ("trainer",), False),
        (13, ("trainer", "spot-0", "spot-1"), False),
    ]


def test_the_template_is_a_valid_job():
    assert load_job(Path(str(files("sky_yamls") / "template.yaml"))).job.name == "my-job"


def test_the_old_name_of_a_section_works_with_a_warning(write, capsys):
    job = load_job(write("name: a\nreclaims: {notice: 90s}\n")).job
    assert job.preemptions.notice == 90_000
    assert "line 2: reclaims is called preemptions now; write preemptions" in capsys.readouterr().err
    assert load_job(write("name: a\n"), {"reclaims.trace": "none"}).job.preemptions.trace == "none"
    assert "--set reclaims.trace: reclaims is called preemptions now" in capsys.readouterr().err
    with pytest.raises(JobError, match=r"line 2: preemptions.trace is 'x'"):
        load_job(write("name: a\nreclaims: {trace: x}\n"))
    assert Job.model_validate({"reclaims": {"trace": "none"}}).preemptions.trace == "none", "jobs stored in ledgers"


def test_the_engine_gets_its_part_of_the_job(write):
    job = load_job(write("iterations: 7\nreward: ocr\n")).job
    assert job.engine() == EngineConfig(iterations=7)


def test_image_sharing_is_configured_under_runtime(write):
    runtime = load_job(write("runtime: {sp_degree: auto, resume: exact}\n")).job.engine().runtime
    assert (runtime.name, runtime.sp_degree, runtime.resume) == ("local", "auto", "exact")
    on_ray = load_job(write("runtime: {sp_degree: auto}\n"), {"runtime": "ray", "runtime.sp_degree": "2"}).job.runtime
    assert (on_ray.name, on_ray.sp_degree) == ("ray", 2)


def test_a_job_survives_the_ledger(write):
    job = load_job(
        write("budget: {max_total: $12.345678, deadline: 12h30m}\nsecrets: [A]\npreemptions: {notice: 90s}\n")
    ).job
    assert Job.model_validate(job.model_dump(mode="json")) == job
    assert job.model_dump(mode="json")["budget"]["max_total"] == "$12.345678"


def test_equal_jobs_have_equal_digests(write):
    short = load_job(write("reward: ocr\nname: a\n")).digest
    long = load_job(write("# a comment\nname: a\nreward:\n  name: ocr\n")).digest
    assert short == long != load_job(write("name: a\nseed: 1\n")).digest


def test_a_job_is_named_by_its_file(tmp_path):
    path = tmp_path / "My job_2.yaml"
    path.write_text("")
    assert load_job(path).job.name == "my-job-2"


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        # unknown keys
        ("seed: 1\niteratons: 3", 2, "iteratons", "did you mean iterations?"),
        ("budget:\n  max_total: $4\n  max_hourl: $3", 3, "budget.max_hourl", "did you mean max_hourly?"),
        ("learning_rate: 3", 1, "learning_rate", "did you mean algorithm.learning_rate?"),
        ("exploration: {budget: {candidatess: 1}}", 1, "exploration.budget.candidatess", "did you mean candidates?"),
        ("import: x", 1, "import", "known here: "),
        ("sp_degree: 2", 1, "sp_degree", "did you mean runtime.sp_degree?"),
        ("resume: exact", 1, "resume", "did you mean runtime.resume?"),
        ("zzz: 3", 1, "zzz", "known here"),
        # types
        ("iterations: true", 1, "iterations", "iterations is true; use a whole number"),
        ("iterations: '12'", 1, "iterations", "use a whole number"),
        ("iterations: 1.5", 1, "iterations", "use a whole number"),
        ("iterations:", 1, "iterations", "is empty"),
        ("budget: 5", 1, "budget", "use a section"),
        ("name: 5", 1, "name", "use a word"),
        ("resources:\n  rollout:\n    num_nodes: [2]", 3, "resources.rollout.num_nodes", "is a list"),
        # values
        ("budget:\n  max_total: -$5", 2, "budget.max_total", "use more than"),
        ("budget:\n  max_total: -5", 2, "budget.max_total", "use more than"),
        ("budget: {max_total: 0}", 1, "budget.max_total", "in a shell, quote it"),
        ("budget: {max_total: forty}", 1, "budget.max_total", "write it like"),
        ("budget: {deadline: 90}", 1, "budget.deadline", "with units"),
        ("exploration:\n  mode: off", 2, "", "exploration.mode: off"),
        ("exploration: {mode: 'off'}", 1, "exploration.mode", "use 'none', 'in-path' or 'stale'"),
        ("exploration: {budget: {candidates: 1, seconds: 3}}", 1, "exploration.budget", "keep one"),
        ("exploration: {budget: {seconds: autp}}", 1, "exploration.budget.seconds", "use 'auto'"),
        ("sampler: {name: flow}", 1, "sampler.name", "did you mean flow-sde?"),
        ("algorithm:\n  images_per_prompt: 1", 2, "algorithm.images_per_prompt", "use 2 or more"),
        ("algorithm: {updates_per_batch: 5}", 1, "algorithm.prompts_per_batch", "does not divide"),
        ("algorithm: {ema_decay: 1}", 1, "algorithm.ema_decay", "use less than 1"),
        ("algorithm: {adam_betas: [0.9, 1]}", 1, "algorithm.adam_betas.1", "use less than 1"),
        ("name: A B", 1, "name", "use up to 40"),
        ("infra: azure", 1, "infra", "use local (this machine, nothing is bought), or clouds: aws, gcp or aws,gcp"),
        ("infra: aws,aws", 1, "infra", "use local"),
        ("infra: local,aws", 1, "infra", "use local"),
        ("infra: gcp/us-east4", 1, "infra", "say regions under resources.trainer.infra"),
        ("infra: gcp\nresources:\n  rollout: {infra: aws/us-east-2}", 3, "resources.rollout.infra", "add aws to infra"),
        ("spot: off", 1, "", "spot: off"),
        ("spot: 'off'", 1, "spot", "use 'auto', 'only' or 'never'"),
        ("spot: only\nresources: {rollout: {use_spot: false}}", 1, "spot", "use spot: never"),
        ("price_overrides: [{cloud: aws, instance_type: i, price: 0}]", 1, "price_overrides.0.price", "more than $0/h"),
        ("discounts: [{cloud: aws, percent: 100}]", 1, "discounts.0.percent", "use less than 100"),
        ("infra: aws\nstore: gs://bucket", 2, "store", "infra does not name"),
        ("store:\n  aws: gs://bucket", 1, "store", "use a bucket of that cloud, like s3://my-bucket"),
        ("store: {azure: blob}", 1, "store", "store has an entry of azure; use aws and gcp"),
        ("store: {aws/us-east-1: 's3://bucket'}", 1, "store", "an entry of aws/us-east-1; use aws and gcp"),
        ("image: {azure/west: blob}", 1, "image", "image has an entry of azure/west"),
        ("ssh_from: 0.0.0.0/0", 1, "ssh_from", "the whole internet"),
        ("ssh_from: home", 1, "ssh_from", "as CIDR"),
        ("recovery: {trainer_wait: 0s}", 1, "recovery.trainer_wait", "no time at all"),
        ("resources: {rollout: {num_nodes: 2, min_nodes: 3}}", 1, "resources.rollout.min_nodes", "min_nodes is 3"),
        ("clock_factor: 0", 1, "clock_factor", "use 'auto', or more than"),
        ("resources: {rollout: {use_spot: auto}}", 1, "resources.rollout.use_spot", "use true or false"),
        ("spot: never\nresources: {trainer: {use_spot: true}}", 2, "resources.trainer.use_spot", "or spot: auto"),
        ("resources: {trainer: {num_nodes: 2, use_spot: true}}\nruntime: {trainer_ranks: 2}", 1,
         "resources.trainer.use_spot", "use false, or one node"),
        ("runtime: {name: ray}\nresources: {trainer: {use_spot: true}}", 2, "resources.trainer.use_spot",
         "runtime: {name: local}"),
        ("resources: {trainer: {num_nodes: 0}}", 1, "resources.trainer.num_nodes", "is 0; use 1 or more"),
        ("resources: {trainer: {num_nodes: 2}}", 1, "resources.trainer.num_nodes", "set runtime.trainer_ranks: 2, one"),
        ("runtime: {trainer_ranks: 3}\nresources: {trainer: {num_nodes: 2}}", 2, "resources.trainer.num_nodes",
         "but runtime.trainer_ranks is 3; set runtime.trainer_ranks: 2"),
        ("runtime: {name: ray, trainer_ranks: 2}\nresources: {trainer: {num_nodes: 2}}", 2,
         "resources.trainer.num_nodes", "but runtime.name is ray; use 1"),
        ("infra: aws\nresources: {trainer: {num_nodes: 2}}", 2, "resources.trainer.num_nodes",
         "but runtime.trainer_ranks is auto; set runtime.trainer_ranks: 2, one on each node"),
        ("infra: gcp\nruntime: {trainer_ranks: 3}\nresources: {trainer: {num_nodes: 2}}", 3,
         "resources.trainer.num_nodes", "or another multiple of 2"),
        ("infra: aws\nruntime: {name: ray, trainer_ranks: 2}\nresources: {trainer: {num_nodes: 2}}", 3,
         "resources.trainer.num_nodes", "but runtime.name is ray; use 1"),
        ("resources: {rollout: {accelerators: 'L4:x'}}", 1, "resources.rollout.accelerators", "like L4:1"),
        ("reward: ocrr", 1, "reward.name", "use ocr"),
        ("reward: 'my reward:f'", 1, "reward.name", "package.module:function"),
        ("model: qwen-image", 1, "model.name", "model.path is missing"),
        ("runtime: {sp_degree: 0}", 1, "runtime.sp_degree", "is 0; use 'auto', or 1 or more"),
        ("runtime:\n  sp_degree: 2.5", 2, "runtime.sp_degree", "use 'auto', or a whole number"),
        ("runtime: {sp_degree: atuo}", 1, "runtime.sp_degree", "is 'atuo'; use 'auto'"),
        ("runtime: {resume: restarts}", 1, "runtime.resume", "did you mean restart?"),
        # unreachable targets
        ("target: {value: 1.5}", 1, "target.value", "use more than 0 and at most 1"),
        ("target: {value: -1}", 1, "target.value", "use more than 0 and at most 1"),
        ("target: {metric: exactmatch, value: 0.5}", 1, "target.metric", "has exact_match, similarity, reward"),
        ("target: {value: 0.5, guards: [{metric: blur, max: 1}]}", 1, "target.guards", "similarity, reward, drift"),
        ("target: {value: 0.5, guards: [{metric: drift}]}", 1, "target.guards.0.max", "is missing"),
        ("target: {value: 0.5, evaluations: 99}", 1, "target.evaluations", "make 14"),
        ("target:\n  metric: exact_match", 1, "target.value", "is missing"),
        # the cost of a point
        ("stop: {usd_per_point: 0}", 1, "stop.usd_per_point", "$0.00 for a point (+.01 of score) ends every run"),
        ("stop: {usd_per_point: -5}", 1, "stop.usd_per_point", "use more than $0, like $50"),
        ("stop: {usd_per_point: much}", 1, "stop.usd_per_point", "write it like $40"),
        ("stop: {usd_per_point: 50}", 1, "stop.usd_per_point", "but the job has no target"),
        ("stop: {usd_per_point: 50}\ntarget: {value: 0.5}\niterations: 20", 1, "stop.usd_per_point",
         "takes at least 8 evaluations"),
        # files
        ("prompts: nofile.txt", 1, "prompts", "there is no file"),
        ("prompts: /prompts.txt", 1, "prompts", "in the folder of the job file"),
        ("prompts: ../prompts.txt", 1, "prompts", "in the folder of the job file"),
        ("model: {path: nowhere}", 1, "model.path", "no such folder"),
        # the file itself
        ("seed: 1\nseed: 2", 2, "", "stands here and on line 1"),
        ("a: &a [1]\nb: *a", 1, "", "alias or anchor"),
    ],
)  # fmt: skip
def test_a_bad_job_is_refused_with_its_line_and_a_remedy(write, text, line, field, words):
    path = write(text + "\n")
    with pytest.raises(JobError) as caught:
        load_job(path)
    error = caught.value
    assert words in str(error)
    assert (error.line, error.field, error.file) == (line, field, str(path))
    assert error.exit_code == 3
    assert error.remedy
    assert "\n" not in str(error), "one message"


@pytest.mark.parametrize(
    "text",
    [
        "secrets: [HF_TOKEN=hunter2]",
        "secrets: {HF_TOKEN: hunter2}",
        "secrets: hunter2",
        "secrets: [hunter-2]",
        "secrets: [[hunter2]]",
    ],
)
def test_a_secret_written_into_a_job_is_not_printed(write, text):
    with pytest.raises(JobError) as caught:
        load_job(write(text))
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    "http",
    [
        "{url: 'http://a', key: hunter-2}",
        "{url: 'http://a', key: hunter2}",
        "{url: 'http://a', key: [hunter2]}",
        "{url: 'http://me:hunter2@a'}",
    ],
)
def test_a_key_written_into_a_reward_is_not_printed(write, http):
    with pytest.raises(JobError) as caught:
        load_job(write(f"reward: {{name: http, http: {http}}}"))
    assert "hunter" not in str(caught.value)


def test_the_key_of_a_reward_must_be_a_secret(write):
    text = "reward: {name: http, http: {url: 'http://a', key: JUDGE_KEY}}\n"
    with pytest.raises(JobError, match=r"line 1: reward.http.key names a variable that secrets does not list.*add it"):
        load_job(write(text))
    assert load_job(write(f"{text}secrets: [JUDGE_KEY]\n")).job.engine().reward.key_names == ("JUDGE_KEY",)
    judge = "reward: {name: vlm, vlm: {url: 'http://a', model: m, key: JUDGE_KEY}}\n"
    with pytest.raises(JobError, match=r"line 1: reward.vlm.key names a variable that secrets does not list"):
        load_job(write(judge))


def test_a_list_of_rewards_is_short_for_their_sum(write):
    reward = load_job(write("reward:\n  - {name: ocr}\n  - {name: my_reward:look, weight: .5}\n")).job.reward
    assert (reward.name, [(one.name, one.weight) for one in reward.parts]) == (
        "sum",
        [("ocr", 1), ("my_reward:look", 0.5)],
    )
    with pytest.raises(JobError, match=r"line 3: .*reward.name is 'ocrr'; use ocr, "):
        load_job(write("seed: 1\n\nreward: [{name: ocr}, {name: ocrr}]\n"))
    keyed = "{name: http, http: {url: 'http://a', key: JUDGE_KEY}}"
    with pytest.raises(JobError, match=r"reward.http.key names a variable that secrets does not list"):
        load_job(write(f"reward: [{{name: ocr}}, {keyed}]\n"))


def test_a_missing_job_file_error_has_a_remedy(tmp_path):
    with pytest.raises(JobError, match=r"nope.yaml: there is no such file; .*spotrl init"):
        load_job(tmp_path / "nope.yaml")


def test_a_users_prompt_file_is_found_beside_the_job(write, tmp_path):
    (tmp_path / "mine.txt").write_text("a cat\na dog\n")
    checked = load_job(write("prompts: mine.txt"))
    assert (checked.workdir / checked.job.prompts).read_text().startswith("a cat")
    (tmp_path / "mine.txt").write_text("\n\n")
    with pytest.raises(JobError, match="has no prompts"):
        load_job(write("prompts: mine.txt"))


def test_test_prompts_are_found_beside_the_job(write, tmp_path):
    (tmp_path / "mine.txt").write_text("a cat\na dog\n")
    with pytest.raises(JobError, match=r"line 2: test_prompts is 'test.txt', but there is no file"):
        load_job(write("prompts: mine.txt\ntest_prompts: test.txt\n"))
    with pytest.raises(JobError, match=r"test_prompts is '../test.txt'; use a file in the folder of the job file"):
        load_job(write("prompts: mine.txt\ntest_prompts: ../test.txt\n"))
    (tmp_path / "test.txt").write_text("a cow\n")
    assert load_job(write("prompts: mine.txt\ntest_prompts: test.txt\n")).job.engine().test_prompts == "test.txt"


def test_a_line_of_a_jsonl_file_that_is_no_prompt_is_found_before_anything_is_bought(write, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a cat"}\n{"text": "a dog"}\n')
    with pytest.raises(JobError, match=r'line 1: .*mine.jsonl, line 2 has no text under "prompt"; write one object'):
        load_job(write("prompts: mine.jsonl"))


def test_the_folder_of_a_scorer_must_be_here_unless_it_is_a_folder_of_cloud_nodes(write, tmp_path):
    with pytest.raises(JobError, match=r"line 1: reward.model.path is 'clip', and there is no such folder"):
        load_job(write("reward: {name: clip, model: {path: clip}}"))
    (tmp_path / "clip").mkdir()
    load_job(write("reward: {name: clip, model: {path: clip}}\n"))
    load_job(write("reward: {name: clip, model: {path: /opt/clip}}\ninfra: aws\n"))


def test_flag_beats_environment_beats_file_beats_user_config_beats_default(write, tmp_path):
    user = tmp_path / "config.yaml"
    user.write_text("iterations: 4\nseed: 4\nclock_factor: 4\nbudget: {max_total: $4, max_hourly: $4}\n")
    path = write("iterations: 3\nseed: 3\nclock_factor: 3\n")
    environ = {"SPOTRL_ITERATIONS": "2", "SPOTRL_SEED": "2", "SPOTRL_HOME": "/nowhere", "PATH": "x"}
    checked = load_job(path, {"iterations": 1}, environ=environ, user_config=user)
    job, origins = checked.job, checked.origins
    assert (job.iterations, job.seed, job.clock_factor, job.budget.max_total, job.name) == (1, 2, 3, 4_000_000, "job")
    assert origins["iterations"] == "--iterations"
    assert origins["seed"] == "SPOTRL_SEED"
    assert origins["clock_factor"] == "job.yaml, line 3"
    assert origins["budget.max_total"] == "config.yaml, line 4"
    assert origins["sampler.steps"] == "default"


def test_nested_fields_have_environment_variables(write):
    checked = load_job(write("budget: {max_total: $40}"), environ={"SPOTRL_BUDGET__MAX_TOTAL": "12.5"})
    assert checked.job.budget.max_total == 12_500_000


@pytest.mark.parametrize(
    ("overrides", "environ", "words"),
    [
        ({"budget.max_total": "-3"}, {}, "--max-total: budget.max_total"),
        ({"sampler.stepz": "3"}, {}, "--set sampler.stepz: sampler.stepz is not a key"),
        ({}, {"SPOTRL_BUGDET__MAX_TOTAL": "3"}, "SPOTRL_BUGDET__MAX_TOTAL: bugdet is not a key"),
        ({}, {"SPOTRL_ITERATIONS": "off"}, "SPOTRL_ITERATIONS: `off` is true or false"),
        ({}, {"SPOTRL_SEED": "nan"}, "SPOTRL_SEED: seed is 'nan'"),
        ({}, {"SPOTRL_BUDGET__MAX_TOTAL": " "}, "SPOTRL_BUDGET__MAX_TOTAL: it has no value; give it one"),
    ],
)  # fmt: skip
def test_an_error_names_the_source_of_the_wrong_value(write, overrides, environ, words):
    with pytest.raises(JobError) as caught:
        load_job(write(""), overrides, environ=environ)
    assert words in str(caught.value)
    assert caught.value.line is None


def test_a_higher_config_layer_replaces_the_kind_of_exploration_budget(write):
    path = write("exploration: {budget: {candidates: 144}}")
    assert load_job(path, {"exploration.budget.seconds": "auto"}).job.exploration.budget == SecondsBudget()
    patient = load_job(path, {"exploration.budget.patience_seconds": "5"}).job.exploration.budget
    assert patient == CandidateBudget(candidates=144, patience_seconds=5)


def test_resources_accept_the_syntax_of_skypilot(write):
    rollout = load_job(
        write("resources: {rollout: {accelerators: {H100: 8}, infra: aws/us-east-2}}")
    ).job.resources.rollout
    assert (rollout.accelerators, rollout.accelerator, rollout.gpus) == ("H100:8", "H100", 8)
    assert (rollout.use_spot, rollout.num_nodes) == (True, 2), "rollout is two spot nodes unless it says otherwise"


def test_the_local_infra_prices_its_nodes_as_any_gpu_of_the_tables(write):
    text = "resources: {trainer: {accelerators: V100:1}}\n"
    assert load_job(write(text)).job.resources.trainer.accelerator == "V100"
    with pytest.raises(JobError, match=r"line 1: resources.trainer.accelerators is V100:1, a GPU older"):
        load_job(write(text + "infra: gcp\n"))


def test_clouds_are_a_list_and_local_is_none(write):
    assert load_job(write("infra: gcp, aws")).job.infra == "gcp,aws"
    assert load_job(write("infra: gcp, aws")).job.clouds == ("gcp", "aws")
    assert load_job(write("")).job.clouds == ()


def test_no_node_of_a_cloud_computes_on_its_cpu_unless_the_job_says_so(write):
    devices = {"": "auto", "infra: aws": "cuda", "infra: aws\nruntime: {device: cpu}": "cpu"}
    assert {text: load_job(write(text)).job.engine().runtime.device for text in devices} == devices


def test_spot_never_overrides_the_use_spot_of_rollout_nodes(write):
    assert load_job(write("")).job.rolls_out_on_spot
    assert not load_job(write("spot: never")).job.rolls_out_on_spot
    assert not load_job(write("resources: {rollout: {use_spot: false}}")).job.rolls_out_on_spot


def test_a_bucket_belongs_to_one_cloud(write):
    assert load_job(write("infra: gcp\nstore: gs://bucket/folder/")).job.store == {"gcp": "gs://bucket/folder"}
    both = load_job(write("infra: aws,gcp\nstore: {aws: s3://one, gcp: gs://two}")).job
    assert both.store == {"aws": "s3://one", "gcp": "gs://two"}
    assert Job.model_validate(both.model_dump(mode="json")) == both


def test_own_prices_survive_the_ledger(write):
    override = "price_overrides: [{cloud: aws, instance_type: p5.48xlarge, price: $40/h}]"
    job = load_job(write(f"{override}\ndiscounts: [{{cloud: gcp, percent: 12.5}}]\n")).job
    assert job.price_overrides[0].price == 40_000_000
    assert Job.model_validate(job.model_dump(mode="json")) == job


def test_weights_are_checked_here_only_for_local_nodes(write):
    qwen = "model: {name: qwen-image, path: nowhere}\n"
    assert load_job(write(f"{qwen}infra: aws")).job.model.path == "nowhere"
    with pytest.raises(JobError, match="no such folder"):
        load_job(write(qwen))


def test_the_reference_recipe_has_the_published_settings():
    """The settings are those of flow_grpo and verl-omni for Qwen-Image."""
    checked = load_job(Path(str(files("sky_yamls") / "qwen_image_ocr.yaml")))
    job = checked.job
    assert (job.model.name, job.model.weights, job.model.lora_rank, job.model.lora_alpha) == (
        "qwen-image",
        "lora",
        64,
        128,
    )
    assert (job.algorithm.prompts_per_batch, job.algorithm.images_per_prompt) == (32, 16)
    assert (job.sampler.steps, job.evaluation.steps, job.sampler.guidance, job.sampler.noise_level) == (10, 50, 4, 1.2)
    assert (job.sampler.window.size, job.sampler.window.first, job.sampler.window.last) == (2, 0, 5)
    assert (job.algorithm.learning_rate, job.algorithm.clip_range, job.algorithm.kl_beta) == (3e-4, 1e-5, 0)
    assert (job.iterations, job.evaluation.every) == (300, 30)
    trainer, rollout = job.resources.trainer, job.resources.rollout
    assert (trainer.accelerators, rollout.accelerators, rollout.num_nodes) == ("H100:1", "H100:8", 1)
    assert (job.infra, job.spot) == ("aws,gcp", "auto")
    assert job.budget.max_total
    assert job.budget.max_hourly


def test_the_reference_recipe_evaluates_words_that_it_does_not_train():
    from engine.prompts import file_prompts
    from engine.rewards.ocr import target_text

    job = load_job(Path(str(files("sky_yamls") / "qwen_image_ocr.yaml"))).job
    path, test = (Path(str(files("sky_yamls") / str(name))) for name in (job.prompts, job.test_prompts))
    prompts = file_prompts(path, job.seed, job.algorithm.prompts_per_batch, job.evaluation.prompts, test)
    assert not {target_text(line) for line in prompts.trained} & {target_text(line) for line in prompts.evaluated}
    assert len(prompts.trained) == 140
    assert len(prompts.evaluated) == job.evaluation.prompts


def test_a_late_error_names_the_line_of_its_field(write):
    checked = load_job(write("seed: 1\nreward: my.module:score\n"))
    error = checked.error("reward", "it raised ZeroDivisionError", "correct it")
    assert str(error).endswith("job.yaml, line 2: it raised ZeroDivisionError; correct it")


def test_every_reward_of_the_engine_can_be_chosen():
    from engine.rewards.load import BUILT_IN
    from launcher.job.agreement import METRICS, REWARDS

    assert set(REWARDS) == set(BUILT_IN)
    assert set(METRICS) == {*BUILT_IN} - {"http", "vlm"}
