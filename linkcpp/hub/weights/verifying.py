"""Reading a model of the hub again: are its files what was hashed when it was added?"""

import gzip

from linkcpp.common.errors import LinkcppError
from linkcpp.hub.weights.adding import hash_units
from linkcpp.hub.weights.catalogue import Catalogue, Entry
from linkcpp.model.slices.hashing import Progress
from linkcpp.model.slices.model_manifest import ModelManifest, model_manifest, plan_hashes
from linkcpp.model.slices.writing import open_whole_model


def problem_with(catalogue: Catalogue, entry: Entry, on_progress: Progress) -> str | None:
    """Hash all files of a model that lie on this disk, and say what is wrong with them.

    Raises:
        LinkcppError: the model's manifest cannot be read.
    """
    if problem := catalogue.problem(entry):
        return problem
    if not entry.files:
        return None
    content = gzip.decompress(catalogue.manifest(entry.model.name))
    promised = ModelManifest.model_validate_json(content)
    try:
        with open_whole_model(catalogue.local_files(entry)[0].path) as files:
            plan = plan_hashes(files)
            digests = hash_units(files, plan, {}, lambda *_: None, on_progress)
            found = model_manifest(files, plan, digests, promised.model)
    except LinkcppError as error:
        return error.message
    if found == promised:
        return None
    return "Its files have other bytes than when it was added, at the same size and time."
