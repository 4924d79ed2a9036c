"""The answers file: which settings may continue it, and what cannot be written is said."""

import pytest
from trainer_cache import small_disk

from hscache import answers
from hscache.answers import append_row, check_settings, open_output
from hscache.errors import CacheMismatchError, ConfigError, DiskFullError


def test_an_output_without_rows_may_be_filled_with_other_settings(tmp_path):
    path = tmp_path / "a.jsonl"
    with open_output(path, {"target": "broken"}):
        pass
    with open_output(path, {"target": "mended"}) as output:
        output.write(b"{}\n")
    assert check_settings(path, {"target": "mended"})
    with pytest.raises(CacheMismatchError, match=r'target +"mended" +"broken"'):
        check_settings(path, {"target": "broken"})


def test_rows_of_unknown_origin_are_not_continued(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    with (
        pytest.raises(CacheMismatchError, match="not known how its rows were made"),
        open_output(tmp_path / "a.jsonl", {}),
    ):
        pass


def test_an_output_in_a_place_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"cannot write to .*(Not a directory|File exists)"),
        open_output(tmp_path / "file" / "a.jsonl", {}),
    ):
        pass


def test_a_row_that_a_full_disk_cuts_is_taken_out_again(tmp_path):
    path = tmp_path / "disk" / "a.jsonl"
    with small_disk(tmp_path / "disk", "64k"), open_output(path, {}) as output:
        append_row(output, path, {"id": 1})
        with pytest.raises(DiskFullError):
            append_row(output, path, {"id": 2, "text": "x" * 100_000})
        assert path.read_bytes() == b'{"id": 1}\n'


def test_a_folder_that_takes_no_new_file_is_a_config_error(tmp_path, monkeypatch):
    def refuse(path, data):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(answers, "replace_atomically", refuse)
    with (
        pytest.raises(ConfigError, match=r"cannot write .*\.settings\.json.*Permission"),
        open_output(tmp_path / "a.jsonl", {}),
    ):
        pass
