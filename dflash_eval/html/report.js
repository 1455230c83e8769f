// Sorting and hover alone: without it, everything is still there to be read.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const number = text => /^[-+]?[\d.,]+/.test(text) ? parseFloat(text.replace(/,/g, "")) : NaN;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.onclick = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = [...body.rows].map(row => [row.cells[column].textContent, row]);
      const numeric = keyed.some(([text]) => !isNaN(number(text)) && column > 0);
      const sign = down ? -1 : 1;
      keyed.sort(([a], [b]) => {
        if (!numeric) return sign * a.localeCompare(b, undefined, {numeric: true});
        const x = number(a), y = number(b);
        return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
      });
      body.append(...keyed.map(([, row]) => row));
    };
  });
}
const tip = document.getElementById("tip");
const visible = text => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
const show = event => {
  const lost = event.target.closest?.("b[data-d]");
  tip.hidden = !lost;
  if (!lost) return;
  const rank = +lost.dataset.r + 1;
  tip.textContent = `drafted ${visible(lost.dataset.d)} for ${visible(lost.textContent)}, its number ${rank}`;
  const box = lost.getClientRects()[0], own = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - own.width - 8)) + "px";
  tip.style.top = (box.top > own.height + 8 ? box.top - own.height - 6 : box.bottom + 6) + "px";
};
document.addEventListener("pointerover", show);
document.addEventListener("click", show);
addEventListener("scroll", () => { tip.hidden = true; }, true);
