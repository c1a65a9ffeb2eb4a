"""Planted bugs of the clouds' bills: rows that count twice, or that are somebody else's."""

from launcher.bill import importing
from launcher.bill.gcp import GcpBill
from launcher.bill.ours import Ours
from launcher.report import bill
from launcher.runs import views
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

BILL = "tests/launcher/test_bill.py::test_"

_ALL = (
    Fault(
        name="rewritten_months_are_added",
        forgets="that AWS writes a whole month again, with new ids",
        patches=((importing, "_keep", changed(importing._keep, "if is_rewritten or replace:", "if replace:")),),
        found_by=f"{BILL}a_month_that_aws_wrote_again_replaces_what_it_said_before",
    ),
    Fault(
        name="parts_of_a_rewritten_month_replace_it",
        forgets="that a file may be a part of a month",
        patches=(
            (importing, "_keep", changed(importing._keep, "and not replace and (missing", "and False and (missing")),
        ),
        found_by=f"{BILL}a_part_of_a_month_that_aws_wrote_again_is_refused",
    ),
    Fault(
        name="overlaps_of_files_count_twice",
        forgets="that files of one import may have the same rows",
        patches=((importing, "_copy", changed(importing._copy, "max(copies)", "sum(copies)")),),
        found_by=f"{BILL}parts_and_overlaps_add_up_to_the_whole_in_any_order",
    ),
    Fault(
        name="rows_of_any_account_are_ours",
        forgets="that others may give their runs the same names",
        patches=((Ours, "match", changed(Ours.match, "if account and account != row.account:", "if False:")),),
        found_by=f"{BILL}rows_of_others_are_told_and_never_counted",
    ),
    Fault(
        name="no_credits_of_google",
        forgets="that Google's cost is without the credits beside it",
        patches=((GcpBill, "read", changed(GcpBill.read, "for credit in credits:", "for credit in ():")),),
        found_by=f"{BILL}credits_of_google_are_lines_beside_the_cost",
    ),
    Fault(
        name="a_part_of_a_bill_is_a_whole_one",
        forgets="that a bill may end before a node did",
        patches=((bill, "NEAR_MS", 10**12),),
        found_by=f"{BILL}a_bill_of_a_part_of_a_life_leaves_the_rest_metered",
    ),
    Fault(
        name="views_keep_an_old_bill",
        forgets="that a kept view was made before the bill came",
        patches=(everywhere(views._marks, changed(views._marks, "billed.scalar_subquery(),", "")),),
        found_by=f"{BILL}a_kept_view_has_the_newest_bill_and_limits_stay_metered",
    ),
)

FAULTS = {fault.name: fault for fault in _ALL}
