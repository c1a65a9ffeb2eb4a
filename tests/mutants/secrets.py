"""Planted bugs of secrets and of what only its owner may read: on nodes, in reports, in files that are sent or kept."""

from typing import Any

from engine.storage import ship
from launcher import without_secrets
from launcher.checks import doctor
from launcher.controller import node_specs
from launcher.provision import provide
from launcher.provision.sky.mirror import NodeMirror
from launcher.report import build, card, comparison
from launcher.runs import runs, service
from launcher.selftest import outcome
from launcher.sinks.shipper import Shipper
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

CLUSTER = "tests/launcher/cluster"
SENT = "tests/launcher/test_report.py::test_a_report_a_comparison_and_a_model_card_have_the_job_without_its_passwords"

FAULTS: dict[str, Fault] = {}


def _fault(name: str, forgets: str, found_by: str, function: Any, old: str, new: str) -> None:
    patches = (everywhere(function, changed(function, old, new)),)
    FAULTS[name] = Fault(name=name, forgets=forgets, patches=patches, found_by=found_by)


_fault(
    "nodes-get-the-users-environment",
    "that nodes need the secrets which the job names, and no other",
    f"{CLUSTER}/test_provisioner_calls.py::"
    "test_nodes_get_the_secrets_that_the_job_names_and_nothing_else_of_this_environment",
    provide.provisioner_of,
    "{name: os.environ[name] for name in job.secrets if name in os.environ}",
    "dict(os.environ)",
)
_fault(
    "a-further-trainer-node-has-a-spot-nodes-token",
    "that each role has a token of its own",
    f"{CLUSTER}/test_whole_trainer.py::"
    "test_the_further_node_is_bought_in_the_real_zone_of_the_first_and_rollouts_after_it",
    node_specs.node_spec,
    "role_token(run.token, role)",
    'role_token(run.token, "rollout")',
)
_fault(
    "a-runs-token-is-its-name",
    "that nobody may guess the token of a run",
    f"{CLUSTER}/test_no_controller.py::test_each_run_has_a_token_that_nobody_guesses_and_a_folder_of_its_owner",
    runs.run_row,
    "secrets.token_urlsafe(32)",
    "name",
)
_fault(
    "a-report-has-the-job-as-it-was-written",
    "that a report is sent around",
    SENT,
    build._report,
    "without_secrets(run.job_yaml)",
    "run.job_yaml",
)
_fault(
    "a-comparison-has-the-passwords-of-its-jobs",
    "that a comparison is sent around",
    SENT,
    comparison.compare_runs,
    "job_without_secrets(run.job)",
    "run.job",
)
_fault(
    "a-model-card-has-the-passwords-of-its-job",
    "that a model card is published",
    SENT,
    card.model_card,
    "job_without_secrets(job)",
    "job",
)
_fault(
    "the-password-of-a-proxy-is-in-the-service",
    "that the address of a proxy may have a password",
    f"{CLUSTER}/test_no_controller.py::test_a_service_is_written_without_any_secret",
    service.kept_variables,
    " and not _has_password(value)",
    "",
)
_fault(
    "a-shorter-secret-is-replaced-first",
    "that a secret may begin with another one",
    "tests/launcher/test_without_secrets.py::test_values_of_secret_variables_are_replaced_anywhere",
    without_secrets.without_secrets,
    "sorted(values, key=len, reverse=True)",
    "values",
)
_fault(
    "a-shorter-private-word-is-replaced-first",
    "that a private word may begin with another one, in the file of a selftest",
    "tests/launcher/test_selftest.py::test_the_file_holds_no_account_identity_bucket_or_user",
    outcome.sendable,
    "key=len, reverse=True",
    "key=len",
)
_fault(
    "a-node-names-the-folder-of-its-log",
    "that a spot node may send any name",
    "tests/engine/test_ship.py::test_a_log_piece_out_of_order_is_ignored",
    ship.keep_piece,
    "NODE_NAME.fullmatch",
    "NODE_NAME.match",
)
_fault(
    "a-spot-node-fills-the-trainers-disk",
    "that a log has a largest size",
    "tests/engine/test_ship.py::test_a_log_ends_at_the_largest_size",
    ship.keep_piece,
    " and size + len(piece) <= LONGEST_LOG_BYTES",
    "",
)
FAULTS["a-mirror-is-readable-by-all"] = Fault(
    name="a-mirror-is-readable-by-all",
    forgets="that other users of this machine may not read a node's files",
    patches=((NodeMirror, "have", changed(NodeMirror.have, "exist_ok=True, mode=0o700", "exist_ok=True")),),
    found_by=f"{CLUSTER}/test_mirror.py::test_only_its_owner_can_read_a_mirror",
)
FAULTS["a-sink-gets-the-passwords-of-the-job"] = Fault(
    name="a-sink-gets-the-passwords-of-the-job",
    forgets="that a team reads the runs of its sink",
    patches=((Shipper, "_open", changed(Shipper._open, "job_without_secrets(self._run.job)", "self._run.job")),),
    found_by=f"{CLUSTER}/test_sinks.py::test_a_sink_gets_every_record_once_also_after_a_restart",
)
_fault(
    "doctor-names-the-user",
    "that a report of `spotrl doctor` is pasted where everybody reads it",
    "tests/launcher/test_doctor.py::test_the_json_report_has_the_same_lines_and_a_broken_part_hides_no_other",
    doctor.without_names,
    "text.replace(name, shown)",
    "text",
)
