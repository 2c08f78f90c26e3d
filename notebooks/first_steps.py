# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps
#
# A Qwen3.5 model mostly consists of Gated DeltaNet layers. Such a layer keeps no list of past tokens: all it
# remembers is one matrix $S$ a head, of a fixed size. This notebook generates a little text with the small
# model that ships with `gdnjax`, and then opens it up to watch those matrices.
#
# It runs on a CPU in under a minute. It needs `pip install -e '.[notebooks]'`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import gdnjax
from gdnjax.state import recurrent_state

plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "font.size": 9})

lm = gdnjax.load("tiny", state_layout="twin", max_requests=2, max_length=256)
assert lm.tokenizer is not None  # a checkpoint may have none; this one has
c = lm.config
print(f"{lm.parameter_count:,} parameters, {c.num_hidden_layers} layers")
print(f"{len(c.gdn_layers)} Gated DeltaNet layers with {c.linear_num_value_heads} heads, layers {c.gdn_layers}")
print(f"{len(c.attention_layers)} attention layers, layers {c.attention_layers}")

# %% [markdown]
# ## Text
#
# `generate` takes a list of prompts and continues all of them in one batch. This model read six novels of Jane
# Austen, plays and poems, and simple word problems. It knows nothing, but it has an ear.

# %%
prompts = ["My dear Emma,", "HAMLET."]
for prompt, result in zip(prompts, lm.generate(prompts, 40, seed=2), strict=True):
    print(f"{prompt}{result.text}\n")

# %% [markdown]
# ## Chat
#
# `encode_chat` puts messages into the model's chat template and returns token ids, which `generate` takes as
# well. Sampling options take one value for all prompts, or one for each: here the same question is answered
# greedily (temperature 0: always the most probable token), and with a good deal of chance.

# %%
question = (
    "A juggler can juggle 80 balls. 25% of the balls are tennis balls, and 25% of the tennis balls are green. "
    "How many green tennis balls are there?"
)
chat = gdnjax.encode_chat(lm.tokenizer, [{"role": "user", "content": question}])
greedy, sampled = lm.generate([chat, chat], 60, temperature=[0.0, 1.5])
print(greedy.text, sampled.text, sep="\n\n")

# %% [markdown]
# ## One token at a time
#
# Below `generate` there are pure functions. `decode_step` feeds one token of every request and returns logits
# and a new state; `commit` makes that state current. The state is *donated*: the step updates it where it lies
# in memory, so the old one must not be used again.
#
# We feed a sentence to request 0 token by token, and write down the matrices $S$ of every GDN layer.

# %%
step = jax.jit(gdnjax.decode_step, donate_argnames="state")
commit = jax.jit(gdnjax.commit, donate_argnames="state")

text = "Emma was very sorry to leave her father, and her father was very sorry to part with Emma."
ids = lm.tokenizer.encode(text)
words = [lm.tokenizer.decode([i]).strip() for i in ids]

state = gdnjax.init_state(c)
all_logits, norms = [], []
for token in ids:
    batch = gdnjax.Batch(jnp.array([token]), jnp.array([0]))  # one row: this token, of request 0
    logits, state = step(lm.params, state, batch)
    state = commit(state)
    all_logits.append(logits[0])
    norms.append([jnp.linalg.norm(recurrent_state(state, layer, 0)) for layer in range(len(c.gdn_layers))])
norms = np.array(norms)
print(f"{len(ids)} tokens; every S is {c.linear_num_value_heads} heads of {recurrent_state(state, 0, 0).shape[1:]}")

# %% [markdown]
# The norm of $S$, all heads of a layer together. It grows from nothing, and in most layers it soon stays about
# where it is, because each step forgets as well as it stores. The memory it takes is the same all along, while
# an attention layer's cache has grown by one entry a token.

# %%
fig, ax = plt.subplots(figsize=(8, 2.6))
image = ax.imshow(norms.T, aspect="auto", cmap="viridis")
ax.set_xticks(range(len(words)), words, rotation=60, ha="right")
ax.set_yticks(range(len(c.gdn_layers)), [f"layer {i}" for i in c.gdn_layers])
ax.set_title("norm of S after each token")
colors = fig.colorbar(image)

# %% [markdown]
# ## The two gates
#
# What a head does with a token's key $k$ and value $v$ is
#
# $$S \leftarrow e^{g} S, \qquad S \leftarrow S + \beta\,(v - S k)\,k^\top, \qquad \text{output} = S q .$$
#
# The decay $e^g$ says how much of the past stays: 1 keeps everything, 0 forgets everything. $\beta$ says how
# firmly the value stored under $k$ is corrected: 1 replaces it, 0 leaves it. The model computes both anew for
# every token and head. `forward_with_intermediates` runs a whole sequence at once and hands them out.

# %%
logits, seen = jax.jit(gdnjax.forward_with_intermediates, static_argnames="config")(
    lm.params, config=c, tokens=jnp.array([ids])
)
decay = np.concatenate([np.exp(g[0]) for g in seen.log_decay], axis=1).T  # [layers * heads, tokens]
beta = np.concatenate([b[0] for b in seen.beta], axis=1).T

heads = c.linear_num_value_heads
fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
for ax, values, title in zip(
    axes, (decay, beta), ("decay exp(g): what stays", "beta: how firmly it writes"), strict=True
):
    image = ax.imshow(values, aspect="auto", cmap="magma", vmin=0, vmax=1)
    ax.set_xticks(range(len(words)), words, rotation=60, ha="right")
    ax.set_yticks(np.arange(len(c.gdn_layers)) * heads + (heads - 1) / 2, [f"layer {i}" for i in c.gdn_layers])
    for edge in range(heads, len(decay), heads):
        ax.axhline(edge - 0.5, color="deepskyblue", linewidth=1.5)
    ax.set_title(title)
colors = fig.colorbar(image, ax=axes)

# %% [markdown]
# Each band is a layer and each row in it a head. Rows that are bright on the left picture are heads with a long
# memory, dark ones look only a few tokens back.
#
# The two ways of computing, all at once and token by token, agree up to rounding:

# %%
for layer, whole in enumerate(seen.recurrent):
    assert jnp.abs(whole[0] - recurrent_state(state, layer, 0)).max() < 1e-3
assert jnp.abs(logits[0] - jnp.stack(all_logits)).max() < 1e-2
print("same states and same logits")

# %% [markdown]
# ## What a commit does
#
# In the `twin` layout a request owns two slots of each layer's array `[slots, heads, dv, dk]`. A step reads
# `read_slot` and writes `write_slot`, and a commit exchanges the two numbers. No matrix is copied.
#
# We feed one more token and look at the state before the step, after it, and after the commit.


# %%
def look(state):
    """What the picture needs of request 0 and of the first GDN layer, as copies that outlive a donation."""
    return {
        "read": int(state.read_slot[0]),
        "write": int(state.write_slot[0]),
        "position": int(state.position[0]),
        "pending": int(state.pending[0]),
        "slots": np.array(state.recurrent[0]),
    }


batch = gdnjax.Batch(jnp.array(lm.tokenizer.encode(" And")), jnp.array([0]))
before = look(state)
first_logits, state = step(lm.params, state, batch)
after_step = look(state)
state = commit(state)
after_commit = look(state)

# %%
fig, axes = plt.subplots(1, 3, figsize=(11, 2.4))
moments = {"before": before, "after decode_step": after_step, "after commit": after_commit}
for ax, (title, now) in zip(axes, moments.items(), strict=True):
    for slot, matrix in enumerate(now["slots"]):
        color, role = "#eeeeee", "reserved" if slot == 0 else "request 1"
        if slot == now["read"]:
            color, role = "#bfe3c2", "read_slot"
        if slot == now["write"]:
            color, role = "#ffd59a", "write_slot"
        ax.add_patch(Rectangle((slot, 0), 0.92, 0.8, facecolor=color, edgecolor="black"))
        ax.text(slot + 0.46, 0.6, f"slot {slot}", ha="center", weight="bold")
        ax.text(slot + 0.46, 0.4, f"|S| {np.linalg.norm(matrix):.3f}", ha="center")
        ax.text(slot + 0.46, 0.15, role, ha="center")
    ax.set(xlim=(-0.05, 5), ylim=(-0.05, 0.85), title=f"{title}\nposition {now['position']}, pending {now['pending']}")
    ax.axis("off")

# %% [markdown]
# The step wrote only the write slot, so the current state is still there, bit for bit. A step that is not
# committed can simply be dropped: to try several continuations, or because a draft was wrong.

# %%
read = before["read"]
assert np.array_equal(before["slots"][read], after_step["slots"][read])  # the step left the current slot alone
assert not np.array_equal(before["slots"][before["write"]], after_step["slots"][before["write"]])
assert np.array_equal(after_step["slots"], after_commit["slots"])  # the commit touched no matrix
assert (after_commit["read"], after_commit["write"]) == (before["write"], before["read"])

# The same step twice, without a commit in between, gives the same logits.
again = gdnjax.Batch(jnp.array(lm.tokenizer.encode(" she")), jnp.array([0]))
once, state = step(lm.params, state, again)
twice, state = step(lm.params, state, again)
assert np.array_equal(once, twice)
print("the current slot was untouched, and an uncommitted step can be run again")

# %% [markdown]
# ## What the model expects next
#
# The logits after each token say what it thinks will follow. The sentence has "very" twice. The second time a line
# break is far more likely: the books that the model read have lines of 60 to 70 characters, and somewhere in the
# state it keeps count of how long this one has become.

# %%
fig, axes = plt.subplots(1, 3, figsize=(10, 2.2))
places = words.index("sorry"), words.index("very"), words.index("very", 5)
for ax, place in zip(axes, places, strict=True):
    probabilities = np.array(jax.nn.softmax(all_logits[place]))
    best = np.argsort(-probabilities)[:5]
    ax.barh(range(5), probabilities[best], color="#6a8fc5")
    ax.set_yticks(range(5), [repr(lm.tokenizer.decode([i])) for i in best])
    ax.invert_yaxis()
    ax.set_title("... " + lm.tokenizer.decode(ids[max(0, place - 3) : place + 1]).strip() + " ?")
fig.supxlabel("probability of the next token")
fig.align_labels()

# %% [markdown]
# ## From here
#
# * [Generation](../docs/generation.md): all sampling options, streaming, the command line.
# * [Design](../docs/design.md): why the state has this shape.
# * `scripts/generate.py`: the loop over these functions as one short program.
