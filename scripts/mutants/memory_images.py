"""Host images: made whole, proved, kept, and given back (M4, M6-M8)."""

from __future__ import annotations

from mutants.mutant import Mutant

CHUNKS = "csrc/src/chunks.cpp"
IMAGES = "src/torpor/memory/images.py"
BACKING = "src/torpor/memory/backing.py"
SLEEP = "src/torpor/memory/sleep.py"
WAKE = "src/torpor/memory/wake.py"
SLEEP_TESTS = "tests/unit/test_memory_sleep.py::"
WAKE_TESTS = "tests/unit/test_memory_wake.py::"

MUTANTS = (
    Mutant(
        "m4-verify-of-the-copy-removed",
        IMAGES,
        "right = dirty & (job.checked == job.source)",
        "right = dirty.copy()",
        "a copy that went wrong is found when the weights are gone",
        SLEEP_TESTS + "test_m4_a_copy_that_went_wrong_is_found_before_the_unmap",
    ),
    Mutant(
        "m4-verify-of-the-restore-removed",
        IMAGES,
        'self._require_arrived(job, "what was put to sleep; discard the tag and fill it anew")',
        "assert job.checked.size == job.live.size",
        "wrong weights are served",
        WAKE_TESTS + "test_a_restore_that_brings_other_bytes_is_found_and_undone",
    ),
    Mutant(
        "m4-half-overwritten-chunks-are-believed",
        CHUNKS,
        "  chunk.image->valid[chunk.index] = 0;\n  *source = driver.copy_hashed(",
        "  *source = driver.copy_hashed(",
        "an image of a failed sleep passes for the content",
        SLEEP_TESTS + "test_m4_an_image_half_overwritten_by_a_failed_sleep_is_not_believed",
    ),
    Mutant(
        "m4-host-memory-of-a-failed-sleep-is-kept",
        BACKING,
        "                self.give_back(committed)\n",
        "",
        "every sleep that fails for want of host memory leaves less of it",
        SLEEP_TESTS + "test_m4_host_memory_that_was_got_for_a_failed_sleep_is_given_back",
    ),
    Mutant(
        "m4-host-limit-ignored",
        BACKING,
        "if self._limit_bytes is not None and self.committed_bytes + needed > self._limit_bytes:",
        "if self._limit_bytes is not None and self.committed_bytes + needed < 0:",
        "images take the memory that the machine needs",
        SLEEP_TESTS + "test_m4_no_host_memory_leaves_everything_mapped_and_undoes_the_hooks",
    ),
    Mutant(
        "m4-unmap-before-the-images",
        SLEEP,
        "            self._save_images(unmaps)\n",
        "            self._shared.device.unmap([s.region for m in unmaps for s in m.pool.segments])\n"
        "            self._save_images(unmaps)\n",
        "what cannot be copied is gone already",
        SLEEP_TESTS + "test_m4_every_copy_is_complete_before_the_first_unmap",
    ),
    Mutant(
        "m6-image-dropped-although-the-wake-failed",
        WAKE,
        "            self._unmap_again(error)\n",
        "            self._unmap_again(error)\n            self._release_images()\n",
        "a wake that fails once can never succeed: the weights are lost",
        WAKE_TESTS + "test_m6_a_released_image_goes_only_after_the_wake_that_used_it",
    ),
    Mutant(
        "m6-image-dropped-before-the-restore",
        WAKE,
        "        restored = self._restore(to_map)\n",
        "        self._release_images()\n        restored = self._restore(to_map)\n",
        "the image goes before it was used",
        WAKE_TESTS + "test_m6_a_released_image_goes_only_after_the_wake_that_used_it",
    ),
    Mutant(
        "m6-image-dropped-by-every-wake",
        WAKE,
        'if rise.pool.settings.image == "release":',
        'if rise.pool.settings.image in ("release", "retain"):',
        "every sleep copies everything",
        WAKE_TESTS + "test_m6_images_outlive_the_wake_by_default",
    ),
    Mutant(
        "m7-an-image-once-valid-is-trusted",
        CHUNKS,
        "if (is_known(chunk)) return streak.note(false);",
        "return streak.note(false);",
        "what was written since the last sleep is lost",
        SLEEP_TESTS + "test_m7_a_change_that_nothing_reports_is_found_by_its_bytes",
    ),
    Mutant(
        "m7-everything-is-copied-again",
        CHUNKS,
        "if (was_valid && !streak.on()) {",
        "if (was_valid && streak.on() && !streak.on()) {",
        "a clean sleep is as slow as the first",
        SLEEP_TESTS + "test_m7_only_what_changed_since_its_image_is_copied",
    ),
    Mutant(
        "m8-images-of-discarded-tags-stay",
        SLEEP,
        "                    self._shared.images.release(segment)",
        "                    continue",
        "a discard gives no host memory back",
        SLEEP_TESTS + "test_m8_on_host_becomes_lost_without_waking_and_gives_host_memory_back",
    ),
    Mutant(
        "m8-lost-content-can-be-copied",
        SLEEP,
        'if policy == "host" and content is Content.LOST:',
        'if policy == "host" and content is Content.LOST and pool.mapped_segments():',
        "lost content passes for saved",
        SLEEP_TESTS + "test_m8_lost_cannot_become_on_host",
    ),
)
