"""Makes the default model directory: a tokenizer and a chat template, no weights, under 200 KB.

The tokenizer is a byte-level BPE, so it takes any text; it learns from sentences that are put together here
from a list of common words. The same libraries give the same bytes: run `python -m infra.models.make_default_model`.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

DIRECTORY = Path(__file__).parents[2] / "services" / "forebay" / "ingress" / "default_model"
VOCABULARY = 3_000
SENTENCES = 6_000
SEED = 7
CONTEXT_TOKENS = 131_072
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = """
the of and to in is that it was for on are as with his they be at one have this from or had by hot but some what
there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go come did my
sound no most number who over know water than call first people may down side been now find any new work part take
get place made live where after back little only round man year came show every good me give our under name very
through just form much great think say help low line before turn cause same mean differ move right boy old too does
tell sentence set three want air well also play small end put home read hand port large spell add even land here
must big high such follow act why ask men change went light kind off need house picture try us again animal point
mother world near build self earth father head stand own page should country found answer school grow study still
learn plant cover food sun four thought let keep eye never last door between city tree cross since hard start might
story saw far sea draw left late run while press close night real life few stop open seem together next white
children begin got walk example ease paper often always music those both mark book letter until mile river car feet
care second group carry took rain eat room friend began idea fish mountain north once base hear horse cut sure watch
color face wood main enough plain girl usual young ready above ever red list though feel talk bird soon body dog
family direct pose leave song measure state product black short numeral class wind question happen complete ship
area half rock order fire south problem piece told knew pass farm top whole king size heard best hour better true
during hundred remember step early hold west ground interest reach fast five sing listen six table travel less
morning ten simple several vowel toward war lay against pattern slow center love person money serve appear road map
science rule govern pull cold notice voice fall power town fine certain fly unit lead cry dark machine note wait
plan figure star box noun field rest correct able pound done beauty drive stood contain front teach week final gave
green quick develop sleep warm free minute strong special mind behind clear tail produce fact street inch lot
nothing course stay wheel full force blue object decide surface deep moon island foot yet busy test record boat
common gold possible plane age dry wonder laugh thousand ago ran check game shape yes miss brought heat snow bed
bring sit perhaps fill east weight language among event log topic stream server request worker router block cache
prefix token model engine batch queue load memory disk host device latency throughput decision replay journal owner
partition offset key value string list error class function return import result item system user assistant message
prompt answer context default index count total hash seed cost score weight policy pool fleet lease epoch snapshot
metric report trace file path name data code python json http client network process thread signal start stop read
write append apply decode encode verify explain recover deploy scale measure
""".split()


def corpus() -> list[str]:
    """Sentences of the words above, with capitals, punctuation and numbers; the same each time."""
    rng = random.Random(SEED)
    lines = []
    for _ in range(SENTENCES):
        words = [rng.choice(WORDS) for _ in range(rng.randint(4, 14))]
        words[0] = words[0].capitalize()
        if rng.random() < 0.3:
            words.insert(rng.randrange(1, len(words)), str(rng.randrange(2_100)))
        if rng.random() < 0.4:
            words[rng.randrange(len(words) - 1)] += ","
        lines.append(" ".join(words) + rng.choice(".....?!:"))
    return lines


def tokenizer() -> Tokenizer:
    """A byte-level BPE trained on the corpus."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in (PAD, START, END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(corpus(), trainer)
    return made


def files() -> dict[str, bytes]:
    """The directory's files by name."""
    config = {"model_type": "forebay-default", "max_position_embeddings": CONTEXT_TOKENS}
    tokenizer_config = {"bos_token": None, "eos_token": END, "pad_token": PAD, "chat_template": CHAT_TEMPLATE}
    compact = json.loads(tokenizer().to_str())
    return {
        "config.json": _json(config, indent=2),
        "tokenizer_config.json": _json(tokenizer_config, indent=2),
        "tokenizer.json": _json(compact, indent=None),
    }


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (out / name).write_bytes(content)


def _json(content: object, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else None
    return (json.dumps(content, ensure_ascii=False, indent=indent, separators=separators) + "\n").encode()


if __name__ == "__main__":
    main()
