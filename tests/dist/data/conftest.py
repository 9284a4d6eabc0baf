"""Fixtures of several files here."""

from tests.parity.text_folders import bpe_file, folder_config, open_folder, text_folder

__all__ = ["bpe_file", "folder_config", "open_folder", "text_folder"]
