"""`spotrl init`: write a commented job file, or an example job with its prompt files."""

import json
from importlib.resources import files
from pathlib import Path

import click

OCR_PROMPTS = ("qwen_image_ocr_prompts.txt", "qwen_image_ocr_test_prompts.txt")

EXAMPLES = {
    "quickstart": ("quickstart.yaml",),
    "shapes": ("shapes.yaml",),
    "digits_ocr_shared": ("digits_ocr_shared.yaml",),
    "qwen_image_ocr": ("qwen_image_ocr.yaml", *OCR_PROMPTS),
    "sd3_5": ("sd3_5.yaml", *OCR_PROMPTS),
    "sd3_5_geneval": ("sd3_5_geneval.yaml", "geneval_prompts.jsonl"),
    "flux": ("flux.yaml", *OCR_PROMPTS),
    "flux_pickscore": ("flux_pickscore.yaml", "pickscore_prompts.txt"),
    "flux2_klein": ("flux2_klein.yaml", *OCR_PROMPTS),
    "z_image": ("z_image.yaml", *OCR_PROMPTS),
    "sana": ("sana.yaml", "pickscore_prompts.txt"),
    "wan_video": ("wan_video.yaml", *OCR_PROMPTS),
    "wan2_2_video": ("wan2_2_video.yaml", *OCR_PROMPTS),
    "wan_video_http": ("wan_video_http.yaml", *OCR_PROMPTS),
}
"""Files of each example in the package `sky_yamls`. The job file comes first."""


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option(
    "--example",
    type=click.Choice(list(EXAMPLES)),
    metavar="NAME",
    help="Write the example job NAME instead of the commented job file.",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the paths of the written files.")
def init(file: Path | None, example: str | None, force: bool, as_json: bool) -> None:
    """Write a commented job file to FILE (default: job.yaml).

    With --example, the command writes an example job to FILE (default: NAME.yaml), and its prompt files beside FILE:

    \b
      quickstart         four digits, trained on this machine in minutes
      shapes             coloured shapes, trained on this machine
      digits_ocr_shared  the quickstart with sequence parallelism
      qwen_image_ocr     Qwen-Image (20 B) learns to write, on AWS or Google Cloud
      sd3_5              SD3.5-medium (2.2 B) learns to write, on AWS
      sd3_5_geneval      SD3.5-medium learns GenEval's objects, counts and colours
      flux               FLUX.1-dev (12 B) learns to write, on AWS
      flux_pickscore     FLUX.1-dev learns what people prefer (PickScore)
      flux2_klein        FLUX.2-klein (4 B) learns to write, on L40S and L4
      z_image            Z-Image-Turbo (6 B) learns to write, on L40S
      sana               SANA (1.6 B) learns what people prefer, on L4
      wan_video          Wan2.1 (1.3 B) learns to write in videos, on AWS
      wan2_2_video       Wan2.2-TI2V (5 B) learns to write in videos, on L40S
      wan_video_http     Wan2.1 learns from the scores of a server of yours

    \b
    Example:
      spotrl init my-job.yaml
      spotrl init --example quickstart
    """
    names = EXAMPLES[example] if example else ("template.yaml",)
    job = file or Path(names[0] if example else "job.yaml")
    # Write the job last: as long as the job file is missing, the command can be repeated without --force.
    beside = [job.with_name(name) for name in names[1:]]
    texts = {path: (files("sky_yamls") / name).read_text("utf-8") for path, name in zip(beside, names[1:], strict=True)}
    texts[job] = (files("sky_yamls") / names[0]).read_text("utf-8")
    for path, text in texts.items():
        if not force and path.exists() and (path == job or path.read_text("utf-8", errors="replace") != text):
            raise click.ClickException(f"{path} exists; choose another name, or replace it with --force")
    for path, text in texts.items():
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise click.ClickException(f"{path} cannot be written ({error.strerror}); choose another place") from None
    if as_json:
        click.echo(json.dumps({"file": str(job), "beside": [str(path) for path in beside]}))
        return
    click.echo(f"Wrote {' and '.join(str(path) for path in (job, *beside))}\nNext: spotrl launch {job} --dry-run")
