"""huggingface_hub as others use it, over the cache that HF_HOME names. Prints one JSON line."""

import json
import sys

from huggingface_hub import scan_cache_dir, snapshot_download

command, repo = sys.argv[1:3]
if command == "snapshot":
    print(json.dumps({"path": snapshot_download(repo)}))
elif command == "scan":
    info = scan_cache_dir()
    print(json.dumps({
        "warnings": [str(warning) for warning in info.warnings],
        "repos": [
            {"id": found.repo_id, "type": found.repo_type, "refs": sorted(found.refs), "files": sorted(file.file_name for revision in found.revisions for file in revision.files)}
            for found in info.repos
        ],
    }))
elif command == "tokenize":
    from transformers import AutoTokenizer

    print(json.dumps({"ids": AutoTokenizer.from_pretrained(repo)("Hello world")["input_ids"]}))
