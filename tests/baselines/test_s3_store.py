"""A store in a bucket, as a user has it: recorded, gated, red on growth, pruned; and no secret in any output."""

from __future__ import annotations

MODEL = "@pytest.mark.gpumem\ndef test_{name}():\n    torch.ones({size})\n\n\n"


def test_a_store_in_a_bucket_is_recorded_gated_and_pruned(project, s3_url):
    store = f"--gpumem-store={s3_url}"
    project.write(MODEL.format(name="kept", size=1_000_000) + MODEL.format(name="gone", size=10))
    recorded = project.run(store, "--gpumem-update=new", "--gpumem-reason=the first")
    recorded.assert_outcomes(passed=2)
    recorded.stdout.fnmatch_lines(["*2 baselines written (new), 0 left as they were; the reason is kept with 2"])
    project.run(store, "--gpumem-baseline").assert_outcomes(passed=2)

    project.write(MODEL.format(name="kept", size=2_000_000))
    grown = project.run(store, "--gpumem-baseline")
    grown.assert_outcomes(failed=1)
    grown.stdout.fnmatch_lines(["*  reason:   the first", f"*--gpumem-update=all *{s3_url}*"])

    pruned = project.gpumem("prune", store)
    assert "removed cpu-x86_64: test_it.py::test_gone (call)" in pruned.stdout, pruned.stderr
    assert "1 of 2 baselines was unused" in pruned.stdout
    assert not project.store.exists()


def test_a_file_in_a_bucket_that_nobody_understands_is_named_and_left(project, s3, s3_bucket, s3_url):
    path = f"{s3_url}/cpu-x86_64/test_it.py.toml"
    name = path.partition(f"{s3_bucket}/")[2]
    s3.put_object(Bucket=s3_bucket, Key=name, Body=b"format = 99\n")
    project.write(MODEL.format(name="kept", size=10))
    result = project.run(f"--gpumem-store={s3_url}", "--gpumem-update=all")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*{path}: format is 99, *"])
    assert s3.get_object(Bucket=s3_bucket, Key=name)["Body"].read() == b"format = 99\n"


def test_a_password_in_the_location_of_the_store_is_in_no_output(project):
    project.write(MODEL.format(name="it", size=10))
    for url in ("s3://key:hunter2@bucket/x", "nonsense://key:hunter2@host/x"):
        result = project.run(f"--gpumem-store={url}", "--gpumem-baseline")
        assert result.ret == 4
        assert "://***@" in result.stderr.str()
        assert "hunter2" not in result.stdout.str() + result.stderr.str()
