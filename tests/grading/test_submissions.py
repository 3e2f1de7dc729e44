"""What students handed in: forms of platforms, two by one student, files made to do harm."""

import os
import random
import stat
import struct
import zipfile

import known
import pytest
import small_exercise
from handed_in import notebook, write, zipped

from multigpu.errors import UserError
from multigpu.grading import grade, sources, submissions, transplant
from multigpu.grading.pool import Pool
from multigpu.grading.results import Account
from multigpu.grading.submissions import Submission, find

LESSON = "05-ddp-cluster"


def by_student(path):
    found = find(path, LESSON)
    students = [each.student for each in found.submissions]
    assert students == sorted(students, key=lambda name: (name.casefold(), name))
    return {each.student: each for each in found.submissions}


def test_a_folder_of_notebooks_and_folders_of_students(tmp_path):
    write(tmp_path / "ben.ipynb")
    write(tmp_path / "Anna.ipynb")
    write(tmp_path / "cleo" / "my work.ipynb")
    write(tmp_path / "cleo" / "notes.txt", b"x")
    write(tmp_path / "README.md", b"x")
    write(tmp_path / ".ipynb_checkpoints" / "ben-checkpoint.ipynb")
    found = find(tmp_path, LESSON)
    assert [each.student for each in found.submissions] == ["Anna", "ben", "cleo"]
    assert found.submissions[2].file == "cleo/my work.ipynb"
    assert found.submissions[2].data == notebook("my work.ipynb")
    assert [each.problem for each in found.submissions] == ["", "", ""]
    assert len(found.notes) == 1
    assert "README.md" in found.notes[0]


@pytest.mark.parametrize("assignment", [LESSON, "ps5"])
def test_nbgraders_folder(tmp_path, assignment):
    for student in ("anna", "ben"):
        work = tmp_path / "submitted" / student / assignment
        write(work / "work.ipynb")
        write(work / "timestamp.txt", b"2026-11-30 22:58:23.948203 UTC\n")
    found = by_student(tmp_path / "submitted")
    assert set(found) == {"anna", "ben"}
    assert found["anna"].file.endswith(f"anna/{assignment}/work.ipynb")


def test_a_folder_with_the_lessons_name_goes_before_others(tmp_path):
    for assignment in ("a", LESSON, "z"):
        write(tmp_path / "submitted" / "anna" / assignment / "work.ipynb")
    assert f"/{LESSON}/" in by_student(tmp_path / "submitted")["anna"].file


@pytest.mark.parametrize("form", ["zip", "folder"])
def test_canvas(tmp_path, form):
    names = [
        "doejane_12345_9999_Name.ipynb",
        "doejane_12345_67999_Name-1.ipynb",
        "doejane_12345_68000_A.ipynb",
        "doejane_12345_7_Z.ipynb",
        "fürstjürgen_LATE_77_70000_my_work_1_2_x.ipynb",
        "LATE_anon_x7Ky2_70001_Name.ipynb",
        "roe_88_70002_report.pdf",
        "li_99_text.html",
    ]
    path = tmp_path / "submissions.zip"
    zipped(path, *names)
    if form == "folder":
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path / "all")
        path = tmp_path / "all"
    found = by_student(path)
    assert list(found) == [
        "anonymous (Canvas anon_x7Ky2)",
        "doejane (Canvas 12345)",
        "fürstjürgen (Canvas 77)",
        "li (Canvas 99)",
        "roe (Canvas 88)",
    ]
    jane = found["doejane (Canvas 12345)"]
    assert jane.file == "doejane_12345_68000_A.ipynb"
    assert jane.data == notebook(jane.file)
    assert "Name-1.ipynb" in jane.notes[0].text
    assert "report.pdf" in found["roe (Canvas 88)"].problem
    assert found["li (Canvas 99)"].problem


@pytest.mark.parametrize(
    "name",
    [
        "Jane Doe_12345_assignsubmission_file/05 work.ipynb",
        "Jane Doe_12345_assignsubmission_file_/sub/05 work.ipynb",
        "Jane Doe_12345_assignsubmission_file_05 work.ipynb",
        "submissions/Jane Doe_12345_assignsubmission_file_/05 work.ipynb",
    ],
)
def test_moodle(tmp_path, name):
    zipped(tmp_path / "submissions.zip", name)
    found = by_student(tmp_path / "submissions.zip")
    assert list(found) == ["Jane Doe (Moodle 12345)"]
    [submission] = found.values()
    assert submission.data == notebook(name)


FORGED = "X_777_assignsubmission_file_Y_55_66_x.ipynb"  # in the form of Moodle and of Canvas


@pytest.mark.parametrize(
    ("form", "own", "other", "account"),
    [
        (
            "Moodle",
            "Eve_1_assignsubmission_file_{}",
            "Al_2_assignsubmission_file_a.ipynb",
            "1",
        ),
        (
            "Moodle",
            "Eve_1_assignsubmission_file/{}",
            "Al_2_assignsubmission_file/a.ipynb",
            "1",
        ),
        ("Canvas", "eve_1_9_{}", "al_2_8_a.ipynb", "1"),
        ("Canvas", "eve_LATE_1_9_{}", "al_2_8_a.ipynb", "1"),
        ("Canvas", "anon_x7Ky2_9_{}", "anon_x7Ky3_8_a.ipynb", "anon_x7Ky2"),
        ("Canvas", "LATE_anon_x7Ky2_9_{}", "anon_x7Ky3_8_a.ipynb", "anon_x7Ky2"),
        ("", "{}", "al.ipynb", ""),
        ("", "eve/{}", "al.ipynb", ""),
        ("", "submitted/eve/05-ddp-cluster/{}", "submitted/al/05-ddp-cluster/a.ipynb", ""),
    ],
)
def test_a_files_own_name_is_no_other_students_number(tmp_path, form, own, other, account):
    path = zipped(tmp_path / "all.zip", own.format(FORGED), other)
    found = find(path, LESSON).submissions
    assert len(found) == 2
    [eve] = [each for each in found if FORGED in each.file]
    assert eve.account == (Account(form, account) if form else None)
    assert not eve.problem


def test_two_submissions_with_one_number_are_refused_by_name(tmp_path):
    names = ["Al_7_assignsubmission_file/a.ipynb", "Eve_7_assignsubmission_file/a.ipynb"]
    found = find(zipped(tmp_path / "all.zip", *names), LESSON)
    problem = "another submission has Moodle's number 7, too"
    assert [each.problem for each in found.submissions] == [problem] * 2
    assert not any(each.data for each in found.submissions)
    assert found.notes == ["Moodle's number 7 is that of Al (Moodle 7), Eve (Moodle 7)"]


def test_a_folder_that_is_named_like_a_platforms_student(tmp_path):
    names = ["Al (Moodle 7)/a.ipynb", "Al_7_assignsubmission_file/a.ipynb", "x/a.ipynb"]
    names += ["Bo_8_assignsubmission_file/a.ipynb", "Cy_9_assignsubmission_file/a.ipynb"]
    found = find(zipped(tmp_path / "all.zip", *names), LESSON).submissions
    accounts = {each.student: each.account for each in found}
    assert accounts["Al (Moodle 7)"] == Account("Moodle", "7")
    assert accounts["Al [Moodle 7]"] is None


@pytest.mark.parametrize(
    ("zip_name", "names", "students"),
    [
        ("class.zip", ["class/anna.ipynb"], ["anna"]),
        ("class (1).zip", ["class/anna.ipynb"], ["anna"]),
        ("export.zip", ["class/anna.ipynb", "class/ben.ipynb"], ["anna", "ben"]),
        ("export.zip", ["class/anna/x.ipynb", "class/ben/x.ipynb"], ["anna", "ben"]),
        ("export.zip", ["anna/x.ipynb", "ben/x.ipynb"], ["anna", "ben"]),
        ("export.zip", ["anna/x.ipynb"], ["anna"]),
        ("x.zip", ["x/doejane_1_2_a.ipynb", "x/roe_3_4_a.ipynb"], ["doejane", "roe"]),
        (
            "submitted.zip",
            ["submitted/anna/ps/x.ipynb", "submitted/ben/ps/x.ipynb"],
            ["anna", "ben"],
        ),
        (
            "x.zip",
            ["Jo_1_assignsubmission_file/a.ipynb", "Jo_1_assignsubmission_file/b.ipynb"],
            ["Jo"],
        ),
    ],
)
def test_a_folder_that_a_program_adds(tmp_path, zip_name, names, students):
    path = zipped(tmp_path / zip_name, *names)
    assert [student.partition(" (")[0] for student in by_student(path)] == students


def test_a_zip_that_was_unpacked_into_a_folder_of_its_name(tmp_path):
    write(tmp_path / "class" / "class" / "anna.ipynb")
    write(tmp_path / "class" / "class" / "ben" / "x.ipynb")
    assert list(by_student(tmp_path / "class")) == ["anna", "ben"]


def test_utf8_names_without_the_flag(tmp_path):
    """rubyzip and others write UTF-8 and do not say so."""
    path = zipped(tmp_path / "x.zip", "J\u00fcrgen Doe_7_assignsubmission_file_/a.ipynb")
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        offset = archive.start_dir
    central = bytearray(data)
    for place, field in ((0, 6), (offset, 8)):
        flags = struct.unpack_from("<H", central, place + field)[0]
        assert flags & 0x800
        struct.pack_into("<H", central, place + field, flags & ~0x800)
    path.write_bytes(central)
    assert list(by_student(path)) == ["J\u00fcrgen Doe (Moodle 7)"]


def test_the_newest_of_two_counts(tmp_path):
    for name, time in (("old.ipynb", 1_000), ("new.ipynb", 2_000), ("older.ipynb", 500)):
        os.utime(write(tmp_path / "anna" / name), (time, time))
    submission = by_student(tmp_path)["anna"]
    assert submission.file == "anna/new.ipynb"
    assert "old.ipynb" in submission.notes[0].text
    assert "older.ipynb" in submission.notes[0].text


@pytest.mark.parametrize("suffix", ["", "-1", "-12", " (1)", "(2)"])
def test_the_lessons_name_goes_before_the_newest(tmp_path, suffix):
    os.utime(write(tmp_path / "anna" / f"{LESSON}{suffix}.ipynb"), (1_000, 1_000))
    os.utime(write(tmp_path / "anna" / "scratch.ipynb"), (2_000, 2_000))
    assert by_student(tmp_path)["anna"].file == f"anna/{LESSON}{suffix}.ipynb"


def test_what_can_be_read_goes_before_what_cannot(tmp_path):
    write(tmp_path / "anna" / "a.ipynb")
    (tmp_path / "anna" / f"{LESSON}.ipynb").symlink_to("/etc/passwd")
    assert by_student(tmp_path)["anna"].file == "anna/a.ipynb"


def test_links_folders_and_devices_are_not_read(tmp_path):
    write(tmp_path / "secret" / "solution.ipynb", b"secret")
    folder = tmp_path / "handed in"
    write(folder / "honest.ipynb")
    (folder / "link.ipynb").symlink_to(tmp_path / "secret" / "solution.ipynb")
    (folder / "folder.ipynb").mkdir()
    write(folder / "folder.ipynb" / "inner.ipynb")
    os.mkfifo(folder / "fifo.ipynb")
    (folder / "linked").symlink_to(tmp_path / "secret")
    (folder / "submitted").symlink_to(tmp_path / "secret")
    write(folder / "up" / "x.ipynb")
    (folder / "up" / "loop").symlink_to(folder)
    found = by_student(folder)
    assert set(found) == {"honest", "link", "folder.ipynb", "fifo", "up"}
    for student, kind in (("link", "link"), ("fifo", "regular")):
        assert kind in found[student].problem
        assert found[student].data == b""
    for student in ("honest", "folder.ipynb"):
        assert found[student].problem == ""


@pytest.mark.parametrize("replaced", ["folder", "file", "by a fifo"])
def test_a_file_that_was_replaced_by_a_link_since_it_was_listed(tmp_path, replaced):
    write(tmp_path / "secret" / "a.ipynb", b"secret")
    folder = tmp_path / "handed in"
    path = write(folder / "anna" / "a.ipynb")
    with sources.opened(folder) as ([file], _):
        if replaced == "folder":
            path.parent.rename(tmp_path / "gone")
            path.parent.symlink_to(tmp_path / "secret")
        else:
            path.unlink()
            if replaced == "file":
                path.symlink_to(tmp_path / "secret" / "a.ipynb")
            else:
                os.mkfifo(path)
        data, problem = file.read()
    assert data == b""
    assert problem


def test_a_file_that_may_not_be_read(tmp_path):
    write(tmp_path / "anna.ipynb")
    write(tmp_path / "ben.ipynb").chmod(0)
    write(tmp_path / "cleo" / "x.ipynb")
    (tmp_path / "cleo").chmod(0)
    try:
        found = by_student(tmp_path)
    finally:
        (tmp_path / "cleo").chmod(0o700)
    assert found["anna"].problem == ""
    if os.geteuid():
        assert "ermission" in found["ben"].problem


def test_names_in_any_bytes_and_any_locale(tmp_path):
    for name in (
        b"caf\xe9",
        b"\xf0\x9f\x98\x80",
        b"a\nb\x1b[31m",
        b"=1+1",
        b"q\"'<b>",
        b"x" * 240,
    ):
        with open(os.fsencode(tmp_path) + b"/" + name + b".ipynb", "wb") as file:
            file.write(notebook())
    found = by_student(tmp_path)
    assert set(found) == {
        "caf\\xe9",
        "\U0001f600",
        "a\\x0ab\\x1b[31m",
        "=1+1",
        "q\"'<b>",
        "x" * 240,
    }
    assert all(not each.problem for each in found.values())


def test_two_spellings_of_an_accent_are_one_student(tmp_path):
    os.utime(write(tmp_path / "Jose\u0301.ipynb"), (1_000, 1_000))
    os.utime(write(tmp_path / "Jos\u00e9.ipynb"), (2_000, 2_000))
    found = by_student(tmp_path)
    assert list(found) == ["Jos\u00e9"]
    assert found["Jos\u00e9"].notes


def test_one_students_folders_cannot_change_how_others_are_read(tmp_path):
    for student in ("anna", "ben"):
        write(tmp_path / student / "work.ipynb")
    write(tmp_path / "mallory" / LESSON / "work.ipynb")
    write(tmp_path / "mallory" / "x" / "timestamp.txt", b"2000-01-01 00:00 UTC")
    write(tmp_path / "mallory" / "Ben_5_assignsubmission_file" / "work.ipynb")
    write(tmp_path / "mallory" / "anna_12345_6_work.ipynb")
    assert set(by_student(tmp_path)) == {"anna", "ben", "mallory"}


@pytest.mark.parametrize("folder", ["", "submitted"])
def test_a_student_with_too_many_files_hides_nobody(tmp_path, folder, monkeypatch):
    top, tmp_path = tmp_path, tmp_path / folder
    for number in range(50):
        write(tmp_path / "mallory" / f"{number}.ipynb", b"x")
        for name in "xyz":
            write(tmp_path / "mallory" / str(number) / f"{name}.txt", b"x")
    for student in ("anna", "zoe"):
        write(tmp_path / student / "work.ipynb")
    for number in range(19):
        write(tmp_path / "zoe" / f"{number}.txt", b"x")
    monkeypatch.setattr(sources, "MAX_ENTRIES", 20)
    found = find(top, LESSON)
    assert not [each.problem for each in found.submissions if each.problem]
    assert {each.student for each in found.submissions} == {"anna", "mallory", "zoe"}
    assert any("mallory has more than 20 files" in note for note in found.notes)
    entered = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(path) or scandir(path))
    with sources.opened(top) as (files, _):
        assert sum("mallory" in file.path for file in files) <= 20
    assert sum(b"mallory" in path for path in entered) <= 20
    monkeypatch.setattr(sources, "MAX_ENTRIES", 2)
    with pytest.raises(UserError, match="more than 2 entries"):
        find(tmp_path, LESSON)


def test_folders_within_folders_end(tmp_path):
    write(tmp_path / "mallory" / "/".join("d" * 200) / "x.ipynb")
    write(tmp_path / "anna.ipynb")
    zipped(tmp_path / "nested.zip", "/".join("d" * 200) + "/x.ipynb", "anna.ipynb")
    for path in (tmp_path, tmp_path / "nested.zip"):
        found = find(path, LESSON)
        assert [each.student for each in found.submissions] == ["anna"]
        assert any("d/d/d" in note for note in found.notes)


def test_reading_is_capped(tmp_path, monkeypatch):
    write(tmp_path / "anna.ipynb", b"x" * 1_000)
    os.truncate(write(tmp_path / "ben.ipynb"), 1 << 40)
    zipped(tmp_path / "x.zip", "cleo.ipynb")
    monkeypatch.setattr(sources, "MAX_READ", 100)
    found = by_student(tmp_path)
    assert len(found["anna"].data) == 100
    assert len(found["ben"].data) == 100
    monkeypatch.setattr(submissions, "MAX_TOTAL", 150)
    with pytest.raises(UserError, match="two parts"):
        by_student(tmp_path)


def zip_of(path, *entries):
    """A zip of (name or ZipInfo, bytes)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_paths_in_a_zip_that_lead_out_of_it(tmp_path):
    path = zip_of(
        tmp_path / "x.zip",
        ("honest.ipynb", notebook()),
        ("../evil.ipynb", b"x"),
        ("a/../../evil.ipynb", b"x"),
        ("/etc/evil.ipynb", b"x"),
        ("..\\evil.ipynb", b"x"),
        ("C:\\evil.ipynb", b"x"),
        ("sub\\windows.ipynb", notebook()),
        (" ", b"x"),
    )
    before = set(tmp_path.rglob("*"))
    found = find(path, LESSON)
    assert {each.student for each in found.submissions} == {"honest", "sub"}
    assert sum("evil" in note for note in found.notes) == 5
    assert set(tmp_path.rglob("*")) == before, "nothing is unpacked"


def test_links_folders_encrypted_and_unknown_entries_in_a_zip(tmp_path):
    link = zipfile.ZipInfo("link.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    link.create_system = 3
    fifo = zipfile.ZipInfo("fifo.ipynb")
    fifo.external_attr = (stat.S_IFIFO | 0o777) << 16
    lzma = zipfile.ZipInfo("lzma.ipynb")
    lzma.compress_type = zipfile.ZIP_LZMA
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
        archive.writestr(fifo, "")
        archive.writestr(lzma, notebook())
        archive.writestr("folder.ipynb/", "")
        archive.writestr("folder.ipynb/inner.ipynb", notebook())
        archive.writestr("secret.ipynb", notebook())
        archive.writestr("honest.ipynb", notebook())
        archive.writestr("__MACOSX/._honest.ipynb", b"x")
        archive.writestr("inner.zip", b"PK")
    data = bytearray(path.read_bytes())
    for start, field in ((data.rindex(b"PK\x01\x02", 0, data.rindex(b"secret.ipynb")), 8),):
        data[start + field] |= 1
    path.write_bytes(data)
    found = by_student(path)
    assert set(found) == {"link", "fifo", "lzma", "folder.ipynb", "secret", "honest"}
    good = [student for student, each in found.items() if not each.problem]
    assert good == ["folder.ipynb", "honest"]
    assert "encrypted" in found["secret"].problem
    assert "link" in found["link"].problem
    assert find(path, LESSON).notes == ["inner.zip was ignored: it is not a notebook"]


def test_a_zip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_READ", 1 << 20)
    path = zip_of(
        tmp_path / "x.zip",
        ("bomb.ipynb", b"0" * (40 << 20)),
        ("honest.ipynb", notebook()),
        ("large.ipynb", random.Random(0).randbytes(3 << 20)),
    )
    found = by_student(path)
    assert len(found["bomb"].data) == len(found["large"].data) == 1 << 20
    assert found["honest"].data == notebook()
    monkeypatch.setattr(sources, "MAX_ENTRIES", 2)
    with pytest.raises(UserError, match="entries"):
        by_student(path)


def test_a_size_that_is_a_lie(tmp_path):
    """The header says 100 bytes for a file of 3 MiB: no more than 100 are given out."""
    path = zip_of(
        tmp_path / "x.zip", ("a.ipynb", b"0" * (3 << 20)), ("honest.ipynb", notebook())
    )
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    struct.pack_into("<I", data, start + 24, 100)
    path.write_bytes(data)
    found = by_student(path)
    assert len(found["a"].data) <= 100
    assert found["honest"].problem == ""


def test_damaged_bytes_in_a_zip_concern_one_student(tmp_path):
    path = zip_of(
        tmp_path / "x.zip",
        ("anna.ipynb", random.Random(1).randbytes(5_000)),
        ("ben.ipynb", notebook()),
    )
    data = bytearray(path.read_bytes())
    data[1_000:1_100] = bytes(100)
    path.write_bytes(data)
    found = by_student(path)
    assert found["anna"].problem
    assert found["ben"].problem == ""


def test_any_damage_to_a_zip_ends_in_a_sentence_or_in_submissions(tmp_path):
    """Bytes changed at random: UserError, or the other students' files as they were."""
    path = zipped(tmp_path / "x.zip", "anna/a.ipynb", "ben.ipynb", "cleo_1_2_x.ipynb")
    whole = path.read_bytes()
    chance = random.Random(0)
    seen = {"error": 0, "found": 0}
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            found = find(path, LESSON)
        except UserError:
            seen["error"] += 1
            continue
        seen["found"] += 1
        for each in found.submissions:
            assert each.problem or each.data
            (each.student + each.file + each.problem + repr(each.notes)).encode("utf-8")
    assert min(seen.values()) > 20


@pytest.mark.parametrize("kind", ["nothing", "empty", "text", "no zip", "fifo", "empty zip"])
def test_nothing_to_grade(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "empty":
        path.mkdir()
    elif kind == "text":
        write(path / "README.md", b"x")
    elif kind == "no zip":
        path.write_bytes(b"x")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty zip":
        zip_of(path)
    with pytest.raises(UserError, match=str(path)):
        find(path, LESSON)


def test_one_notebook_is_no_folder(tmp_path):
    path = write(tmp_path / "anna.ipynb")
    with pytest.raises(UserError, match="into a folder"):
        find(path, LESSON)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_exercise.solution(tmp_path_factory.mktemp("solutions"))


def changed(small, old, new):
    """The reference notebook of the small exercise, with one text for another."""
    text = known.notebook(small, small_exercise.RIGHT).decode()
    assert old in text
    return text.replace(old, new).encode()


def test_the_notebook_of_another_lesson_is_named(small):
    data = changed(small, "05-ddp-cluster", "02-data-parallel")
    assert not transplant.take(data, small).problem, "all its answer cells are of this lesson"
    own = changed(small, '"grade_id": "mean"', '"grade_id": "other"')
    assert not transplant.take(own, small).problem, "one answer cell is missing"
    other = data.replace(b"# answer: mean", b"# answer: other")
    other = other.replace(b'"grade_id": "mean"', b'"grade_id": "other"')
    answers = transplant.take(other, small)
    assert "02-data-parallel" in answers.problem
    assert answers.lesson == "02-data-parallel"
    assert not answers.sources


def test_all_notebooks_of_another_lesson_are_refused(small, tmp_path):
    other = changed(small, "05-ddp-cluster", "02-data-parallel")
    other = other.replace(b"answer: mean", b"answer: x").replace(b'"mean"', b'"x"')
    given = [Submission("anna", "", other), Submission("ben", "", b"{")]
    folder = tmp_path / "out"
    with Pool(1, 5) as pool, pytest.raises(UserError, match="02-data-parallel"):
        grade.grade(small, given, folder, None, pool, lambda done, of: None)
    assert not folder.exists()
